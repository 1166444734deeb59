"""Prints the paths of the test programs that `cargo test --no-run --message-format=json` built."""

import json
import sys

for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["profile"]["test"]:
        if message["executable"]:
            print(message["executable"])
