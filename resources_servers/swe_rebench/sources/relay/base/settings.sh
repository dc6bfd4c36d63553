# Prints a setting: the last file of enabled/ that has it wins.
cat enabled/*.conf | sed -n "s/^$1=//p" | tail -n 1
