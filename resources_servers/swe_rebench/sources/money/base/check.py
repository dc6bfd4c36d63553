"""The checks of this repository; the output is that of `cargo test`."""

import sys

from money import cents

CHECKS = {
    "money::whole": lambda: cents(3) == 300,
}

print(f"\nrunning {len(CHECKS)} tests")
failed = [name for name, check in CHECKS.items() if not check()]
for name in CHECKS:
    print(f"test {name} ... {'FAILED' if name in failed else 'ok'}")
verdict = "FAILED" if failed else "ok"
print(f"\ntest result: {verdict}. {len(CHECKS) - len(failed)} passed; {len(failed)} failed; 0 ignored")
sys.exit(101 if failed else 0)
