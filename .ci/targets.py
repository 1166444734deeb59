"""Prints the test targets that a package has without optional features, from `cargo metadata --no-deps`: `lib` for
the unit tests, and the names of the others."""

import json
import sys

for package in json.load(sys.stdin)["packages"]:
    if package["name"] != "tracing-profiling":
        continue
    for target in package["targets"]:
        if "lib" in target["kind"]:
            print("lib")
        if "test" in target["kind"] and not target.get("required-features"):
            print(target["name"])
