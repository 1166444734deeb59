"""Prints the test targets that the layer has without optional features, and those of its examples, from
`cargo metadata --no-deps`: `lib` for the unit tests, and the names of the others."""

import json
import sys

for package in json.load(sys.stdin)["packages"]:
    if package["name"] not in ("tracing-profiling", "tracing-profiling-examples"):
        continue
    for target in package["targets"]:
        if "lib" in target["kind"]:
            print("lib")
        if "test" in target["kind"] and not target.get("required-features"):
            print(target["name"])
