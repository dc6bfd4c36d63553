#!/bin/sh
# The checks of this repository; the output is that of `go test -v`.
failed=0

check() {
    echo "=== RUN   $1"
    if [ "$2" = "$3" ]; then
        echo "--- PASS: $1 (0.00s)"
    else
        echo "    run.sh: got '$2', want '$3'"
        echo "--- FAIL: $1 (0.00s)"
        failed=1
    fi
}

check TestGivenPort "$(sh bin/launch.sh 9000)" "serve --port 9000"

[ $failed = 0 ] && echo PASS || echo FAIL
exit $failed
