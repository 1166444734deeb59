"""read_otlp.py FOLDER SPAN=FUNCTION...: the official stubs read each .otlp file of the folder;
the profile of each span has the function in more than half of its samples."""

import sys
from pathlib import Path

from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData


def functions(dictionary, stack_index):
    """The names in a stack, innermost first."""
    for location in dictionary.stack_table[stack_index].location_indices:
        for line in dictionary.location_table[location].lines:
            function = dictionary.function_table[line.function_index]
            yield dictionary.string_table[function.name_strindex]


def read(path):
    data = ProfilesData.FromString(path.read_bytes())
    dictionary = data.dictionary
    for table in ["mapping", "location", "function", "link", "attribute", "stack"]:
        entries = getattr(dictionary, f"{table}_table")
        assert entries[0] == type(entries[0])(), table
    assert dictionary.string_table[0] == ""
    [resource] = data.resource_profiles
    assert any(a.key == "service.name" for a in resource.resource.attributes)
    [scope] = resource.scope_profiles
    [profile] = scope.profiles
    assert path.stem.endswith(profile.profile_id.hex()), profile.profile_id
    end = profile.time_unix_nano + profile.duration_nano
    for sample in profile.samples:
        assert sample.timestamps_unix_nano
        assert all(profile.time_unix_nano <= t < end for t in sample.timestamps_unix_nano)
    return dictionary, profile


folder, wanted = Path(sys.argv[1]), dict(pair.split("=") for pair in sys.argv[2:])
files = sorted(folder.glob("*.otlp"))
found = set()
for path in files:
    dictionary, profile = read(path)
    for span, function in wanted.items():
        if f"-{span}-" in path.name:
            break
    else:
        continue
    found.add(span)
    counts = [
        (len(s.timestamps_unix_nano), any(function in f for f in functions(dictionary, s.stack_index)))
        for s in profile.samples
    ]
    total = sum(count for count, _ in counts)
    guilty = sum(count for count, has in counts if has)
    print(f"{path.name}: {guilty} of {total} samples in {function}")
    assert guilty > total / 2
assert found == set(wanted), files
