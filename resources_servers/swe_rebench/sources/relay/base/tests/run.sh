#!/bin/sh
# The checks of this repository; the output is that of mocha.
passed=0
failures=""
indent="    "

it() {
    if [ "$2" = "$3" ]; then
        passed=$((passed + 1))
        echo "$indent✔ $1"
    else
        failures="$failures x"
        echo "$indent$(echo $failures | wc -w | tr -d ' ')) $1"
    fi
}

echo
echo "  settings"
it "keeps the name" "$(sh settings.sh name)" "relay"

echo
echo "  $passed passing (3ms)"
[ -z "$failures" ] || echo "  $(echo $failures | wc -w | tr -d ' ') failing"
[ -z "$failures" ]
