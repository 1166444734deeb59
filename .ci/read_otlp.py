"""read_otlp.py DIRECTORY SPAN=FUNCTION...: reads each .otlp file of the directory with the official stubs, and checks
that more than half of each span's time, on-CPU and off-CPU together, is in the function. Also checks that the crate states
the version of the stubs."""

import re
import sys
from pathlib import Path

from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2
from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData, Sample


# The kinds of samples but on-CPU, and the bit that their profile's id has turned.
TURNED = {"off_cpu": 1, "await": 2, "scheduling_delay": 4, "alloc_space": 8, "alloc_objects": 16}
# Those that are no times.
ALLOCATED = {"alloc_space", "alloc_objects"}


def frames(dictionary, stack_index):
    """Function, file and line of the frames of a stack, innermost first."""
    strings = dictionary.string_table
    for location in dictionary.stack_table[stack_index].location_indices:
        for line in dictionary.location_table[location].lines:
            function = dictionary.function_table[line.function_index]
            yield strings[function.name_strindex], strings[function.filename_strindex], line.line


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
    first = scope.profiles[0]
    # Each kind but on-CPU has the id with one bit turned, also if it is alone.
    turned = TURNED.get(kind(dictionary, first), 0)
    assert path.stem.endswith(f"{int(first.profile_id.hex(), 16) ^ turned:032x}"), first.profile_id
    assert len({profile.profile_id for profile in scope.profiles}) == len(scope.profiles)
    for profile in scope.profiles:
        end = profile.time_unix_nano + profile.duration_nano
        for sample in profile.samples:
            assert sample.timestamps_unix_nano or sample.values
            assert all(profile.time_unix_nano <= t < end for t in sample.timestamps_unix_nano)
    return dictionary, scope.profiles


def kind(dictionary, profile):
    return dictionary.string_table[profile.sample_type.type_strindex]


def nanoseconds(dictionary, profile, sample):
    """The time that a sample represents."""
    if kind(dictionary, profile) == "samples":
        return (sum(sample.values) or len(sample.timestamps_unix_nano)) * profile.period
    assert kind(dictionary, profile) in ("cpu", *TURNED), kind(dictionary, profile)
    # Waits have a time each. Pyroscope takes others only with one value.
    times = len(sample.values) if kind(dictionary, profile) == "off_cpu" else 0
    assert kind(dictionary, profile) == "cpu" or len(sample.timestamps_unix_nano) == times
    assert kind(dictionary, profile) == "off_cpu" or len(sample.values) == 1
    return sum(sample.values)


def sums(amounts, is_meant):
    """`amounts` are dictionary, sample and amount. The amount of the samples that have such a frame in their stack, and
    that of all."""
    found = [(amount, any(is_meant(*f) for f in frames(d, s.stack_index))) for d, s, amount in amounts]
    return sum(amount for amount, has in found if has), sum(amount for amount, _ in found)


def time_with(dictionary, profiles, is_meant):
    """The time of the profiles' samples that have such a frame in their stack, and the time of all samples."""
    times = (p for p in profiles if kind(dictionary, p) not in ALLOCATED)
    return sums(((dictionary, s, nanoseconds(dictionary, p, s)) for p in times for s in p.samples), is_meant)


def bytes_with(dictionary, profiles, is_meant):
    """The same for the bytes that were allocated."""
    of_bytes = (p for p in profiles if kind(dictionary, p) == "alloc_space")
    return sums(((dictionary, s, sum(s.values)) for p in of_bytes for s in p.samples), is_meant)


def check_version():
    """A break of the protocol changes the package, or the numbers of fields and the version with them."""
    protocol = (Path(__file__).parent.parent / "crates/otlp/src/protocol.rs").read_text()
    [package] = re.findall(r'macro_rules! package \{\s*\(\) => \{\s*"(\w+)"', protocol)
    [number] = re.findall(r'DEVELOPMENT_VERSION: &str = "(\d+)"', protocol)
    service = profiles_service_pb2.DESCRIPTOR.services_by_name["ProfilesService"]
    assert ProfilesData.DESCRIPTOR.full_name == f"opentelemetry.proto.profiles.{package}.ProfilesData"
    assert service.full_name == f"opentelemetry.proto.collector.profiles.{package}.ProfilesService"
    assert "Export" in service.methods_by_name
    fields = sorted(Sample.DESCRIPTOR.fields_by_number.items())
    names = ["stack_index", "attribute_indices", "link_index", "values", "timestamps_unix_nano"]
    assert (number, [(at, field.name) for at, field in fields]) == ("1", list(enumerate(names, 1))), fields


def main():
    check_version()
    directory, wanted = Path(sys.argv[1]), dict(pair.split("=") for pair in sys.argv[2:])
    files = sorted(directory.glob("*.otlp"))
    found = set()
    for path in files:
        dictionary, profiles = read(path)
        for span, function in wanted.items():
            if f"-{span}-" in path.name:
                break
        else:
            continue
        found.add(span)
        guilty, total = time_with(dictionary, profiles, lambda name, *_: function in name)
        print(f"{path.name}: {guilty / 1e6:.0f} of {total / 1e6:.0f} ms in {function}")
        assert guilty > total / 2
    assert found == set(wanted), files


if __name__ == "__main__":
    main()
