"""interop_check.py DIRECTORY: checks what interop.py has stored, as it arrived, with the official stubs. Then breaks the
data in each way of `BROKEN`, each of which must be detected."""
import copy
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from read_otlp import TURNED, bytes_with, kind, time_with

SHOP = Path(__file__).parent.parent / "examples/shop/mod.rs"
# The requests that must leave a profile: the function in which most of the time is, and its file.
GUILTY = {
    "GET /bundles": ("count_cheap_bundles", "shop/mod.rs"),
    "GET /similar": ("sqlite3VdbeExec", "sqlite3.c"),
    "GET /checkout": ("reserve", "shop/mod.rs"),
    "GET /legacy": ("ask_the_old_system", "shop/mod.rs"),
}
# The same for what is allocated.
ALLOCATING = {"GET /prices": ("cheapest_of_own_list", "shop/mod.rs")}
RESOURCE = {"service.name": "shop", "deployment.environment.name": "interop", "service.version": "1.2.3"}


class Wrong(Exception):
    pass


def check(condition, message):
    if not condition:
        raise Wrong(message)


@dataclass
class Arrived:
    """What arrived by one way: the kept profiles, and the traces that refer to them."""

    name: str
    profiles: list
    traces: list
    # The Collector's log, if it was on the way.
    log: str | None = None


@dataclass
class Found:
    """One profile, with what it belongs to."""

    data: ProfilesData
    resource: dict
    profile: object

    @property
    def id(self):
        return self.profile.profile_id.hex()

    @property
    def kind(self):
        return kind(self.data.dictionary, self.profile)


def attributes(entity, strings=()):
    """In what the Collector sends, keys and texts are references into the string table."""
    found = {}
    for attribute in entity.attributes:
        check(not (attribute.key and attribute.key_strindex), f"a key and a reference: {attribute}")
        key = attribute.key or strings[attribute.key_strindex]
        check(key, f"an attribute without a key: {attribute}")
        check(key not in found, f"two attributes {key}")
        value = attribute.value
        of = value.WhichOneof("value")
        found[key] = strings[value.string_value_strindex] if of == "string_value_strindex" else getattr(value, of)
    return found


def with_turned(profile_id, kind):
    """The id of the samples of that kind for that of the on-CPU samples, and the other way round."""
    return f"{int(profile_id, 16) ^ TURNED.get(kind, 0):032x}"


def check_arrived(arrived):
    found = [
        Found(data, attributes(of_resource.resource, data.dictionary.string_table), profile)
        for data in arrived.profiles
        for of_resource in data.resource_profiles
        for of_scope in of_resource.scope_profiles
        for profile in of_scope.profiles
    ]
    resources, spans = read_spans(arrived.traces)
    check_ids(found, spans)
    check_resources(found, resources)
    by_id = {one.id: one for one in found}
    names = set()
    for profile_id in ids_on(spans):
        ids = (with_turned(profile_id, kind) for kind in ("samples", *TURNED))
        parts = [by_id[i] for i in ids if i in by_id]
        root = root_of(profile_id, spans)
        names.add(root.name)
        check_links(parts, root, spans)
        check_guilty(parts, root)
    expected = GUILTY.keys() | ALLOCATING.keys()
    check(expected <= names, f"no profile of {expected - names}")
    for data in arrived.profiles:
        check_rules(data)
    if arrived.log is not None:
        check_printed(found, arrived.log)
    return found, spans


def read_spans(traces):
    resources, spans = [], {}
    for data in traces:
        for of_resource in data.resource_spans:
            resources.append(attributes(of_resource.resource))
            for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
                check(span.span_id not in spans, f"span {span.span_id.hex()} arrived twice")
                spans[span.span_id] = span
    check(len(spans) > 600, f"{len(spans)} spans arrived")
    return resources, spans


def ids_on(spans):
    return {a["profile.id"] for a in map(attributes, spans.values()) if "profile.id" in a}


def root_of(profile_id, spans):
    """The outermost span with that id: kept spans inside it share its profile."""
    with_id = {i: span for i, span in spans.items() if attributes(span).get("profile.id") == profile_id}
    outermost = [span for span in with_id.values() if span.parent_span_id not in with_id]
    check(len(outermost) == 1, f"{profile_id} is on {[span.name for span in outermost]}, not one inside the other")
    return outermost[0]


def check_ids(found, spans):
    """The profile ids on spans are those of the arrived profiles, each once."""
    counts = Counter(one.id for one in found)
    twice = [profile_id for profile_id, count in counts.items() if count > 1]
    check(not twice, f"arrived more than once: {twice}")
    # All kinds of samples have the same id, except for one bit.
    arrived = {with_turned(one.id, one.kind) for one in found}
    ids = ids_on(spans)
    check(ids <= arrived, f"spans name profiles that did not arrive: {ids - arrived}")
    check(arrived <= ids, f"no span names these profiles: {arrived - ids}")
    for kind, what in (("off_cpu", "waits"), ("await", "awaits"), ("alloc_space", "allocations")):
        key = f"profile.{kind}_id"
        named = {a[key] for a in map(attributes, spans.values()) if key in a}
        check(named or kind == "await", f"no span names a profile of {what}")
        lost = named - {one.id for one in found if one.kind == kind}
        check(not lost, f"spans name profiles of {what} that did not arrive: {lost}")
    reasons = [a for a in map(attributes, spans.values()) if "profile.reason" in a]
    check(len(reasons) >= 6, f"{len(reasons)} spans were kept, expected the six that are slow or fail")


def check_resources(found, resources):
    for resource in resources:
        check(RESOURCE.items() <= resource.items(), f"the resource of spans is {resource}")
        check(resource == resources[0], f"spans have different resources: {resource} and {resources[0]}")
    for one in found:
        check(one.resource == resources[0], f"profiles have {one.resource}, but spans {resources[0]}")


def check_links(found, root, spans):
    """Each sample links to the kept span, or to one inside it, and names its innermost span."""
    named = set()
    for one in found:
        for sample in one.profile.samples:
            link = one.data.dictionary.link_table[sample.link_index]
            what = f"profile {one.id} of {root.name}: a sample's link leads to"
            check(link.trace_id == root.trace_id, f"{what} another trace, {link.trace_id.hex()}")
            check(link.span_id in spans, f"{what} a span that did not arrive, {link.span_id.hex()}")
            span = spans[link.span_id]
            check(span.trace_id == root.trace_id, f"{what} a span of another trace")
            while span.span_id != root.span_id:
                check(span.parent_span_id in spans, f"{what} a span outside of it, {spans[link.span_id].name}")
                span = spans[span.parent_span_id]
            named |= set(names_of(one, sample))
    # All the time of these requests is spent in the handler's span, inside the span of the request.
    if root.name in GUILTY:
        handler = root.name.removeprefix("GET /")
        check(handler in named, f"{root.name}: no sample is in {handler}, only in {named}")
        links = [
            one.data.dictionary.link_table[sample.link_index].span_id.hex()
            for one in found
            if one.kind not in TURNED
            for sample in one.profile.samples
        ]
        grafana = attributes(root).get("pyroscope.profile.id")
        check(grafana in (links or [None]), f"{root.name}: {grafana} leads to none of {set(links)}")


def names_of(one, sample):
    """The attributes `span.name` of a sample."""
    table, strings = one.data.dictionary.attribute_table, one.data.dictionary.string_table
    attributes = (table[index] for index in sample.attribute_indices)
    return [a.value.string_value for a in attributes if strings[a.key_strindex] == "span.name"]


def body_of(function):
    """The lines of a function of the shop."""
    lines = SHOP.read_text().splitlines()
    [first] = [n for n, line in enumerate(lines) if line.startswith(f"fn {function}(")]
    return range(first + 1, lines.index("}", first) + 2)


def check_guilty(found, root):
    for guilty, sums_with, unit in ((GUILTY, time_with, "ms"), (ALLOCATING, bytes_with, "MB")):
        if root.name not in guilty:
            continue
        function, file = guilty[root.name]
        body = body_of(function) if file == "shop/mod.rs" else range(1, 1_000_000)

        def is_guilty(name, path, line):
            return name.split("::")[-1] == function and path.endswith(file) and line in body

        shares = [sums_with(one.data.dictionary, [one.profile], is_guilty) for one in found]
        # Nanoseconds, or bytes.
        part, total = (sum(of) / 1e6 for of in zip(*shares))
        message = f"{root.name}: {part:.0f} of {total:.0f} {unit} in {function}, in its lines of {file}"
        check(part > total / 2, message)


def check_printed(found, log):
    """The `debug` exporter of the Collector prints a line for each."""
    printed = {i: int(samples) for i, samples in re.findall(r"\b([0-9a-f]{32}) samples=(\d+)", log)}
    expected = {one.id: len(one.profile.samples) for one in found}
    check(printed == expected, f"the Collector printed {printed}, but {expected} arrived")


def check_rules(data):
    """The rules of the comments in the proto files; and no dictionary entry is duplicate or unused."""
    dictionary = data.dictionary
    strings = dictionary.string_table
    tables = {
        name: getattr(dictionary, f"{name}_table")
        for name in ("string", "attribute", "mapping", "function", "location", "stack", "link")
    }
    used = {name: {0} for name in tables}

    def use(name, index, where):
        check(0 <= index < len(tables[name]), f"{where}: entry {index} of {len(tables[name])} in {name}_table")
        used[name].add(index)
        return tables[name][index]

    def use_attributes(entity, where):
        keys = [strings[use("attribute", i, where).key_strindex] for i in entity.attribute_indices]
        check(len(keys) == len(set(keys)), f"{where}: duplicate attribute in {keys}")

    for name, table in tables.items():
        check(len(table) > 0, f"{name}_table is empty")
        zero = type(table[0])()
        # The Collector writes an empty value, which is equivalent to no value.
        is_zero = table[0] == zero or name == "attribute" and table[0] == type(zero)(value={})
        check(is_zero, f"{name}_table[0] is not zero: {table[0]}")
        unique = {entry if name == "string" else entry.SerializeToString(deterministic=True) for entry in table}
        check(len(unique) == len(table), f"{name}_table: duplicate entry")
    for of_resource in data.resource_profiles:
        entities = [of_resource.resource, *(of_scope.scope for of_scope in of_resource.scope_profiles)]
        for attribute in (attribute for entity in entities for attribute in entity.attributes):
            use("string", attribute.key_strindex, "a resource or scope")
            use("string", attribute.value.string_value_strindex, "a resource or scope")
        for profile in (profile for of_scope in of_resource.scope_profiles for profile in of_scope.profiles):
            check_profile(profile, use, use_attributes)
    for i, stack in enumerate(dictionary.stack_table):
        for index in stack.location_indices:
            use("location", index, f"stack {i}")
    for i, location in enumerate(dictionary.location_table):
        use("mapping", location.mapping_index, f"location {i}")
        use_attributes(location, f"location {i}")
        for line in location.lines:
            use("function", line.function_index, f"location {i}")
            check(line.line >= 0 and line.column >= 0, f"location {i}: {line}")
    for i, function in enumerate(dictionary.function_table):
        names = [function.name_strindex, function.system_name_strindex, function.filename_strindex]
        for index in names:
            use("string", index, f"function {i}")
        check(i == 0 or any(names), f"function {i} has no name and no file")
    for i, mapping in enumerate(dictionary.mapping_table):
        use("string", mapping.filename_strindex, f"mapping {i}")
        use_attributes(mapping, f"mapping {i}")
        start, limit = mapping.memory_start, mapping.memory_limit
        check(start < limit or (start, limit) == (0, 0), f"mapping {i} is from {start} to {limit}")
    for i, attribute in enumerate(dictionary.attribute_table):
        use("string", attribute.key_strindex, f"attribute {i}")
        use("string", attribute.unit_strindex, f"attribute {i}")
    for i, link in enumerate(dictionary.link_table[1:], 1):
        check((len(link.trace_id), len(link.span_id)) == (16, 8), f"link {i} has ids of the wrong length")
    for name, table in tables.items():
        unused = [table[i] for i in range(len(table)) if i not in used[name]]
        check(not unused, f"{name}_table: nothing refers to {unused}")


def check_profile(profile, use, use_attributes):
    where = f"profile {profile.profile_id.hex()}"
    check(len(profile.profile_id) == 16 and any(profile.profile_id), f"{where}: not an id")
    use_attributes(profile, where)
    for value_type in (profile.sample_type, profile.period_type):
        use("string", value_type.type_strindex, where)
        use("string", value_type.unit_strindex, where)
    shapes, identities = set(), []
    for sample in profile.samples:
        use("stack", sample.stack_index, where)
        use("link", sample.link_index, where)
        use_attributes(sample, where)
        identities.append((sample.stack_index, sample.link_index, tuple(sorted(sample.attribute_indices))))
        times, values = sample.timestamps_unix_nano, sample.values
        check(len(times) == len(values) or len(values) == 0 or (len(times) == 0 and len(values) == 1),
              f"{where}: a sample with {len(times)} times and {len(values)} values")
        shapes.add((len(times) > 0, len(values) > 0))
        end = profile.time_unix_nano + profile.duration_nano
        check(all(profile.time_unix_nano <= t < end for t in times), f"{where}: a sample outside the time of its profile")
    check(len(shapes) == 1 and (False, False) not in shapes, f"{where}: samples of the shapes {shapes}")
    check(len(identities) == len(set(identities)), f"{where}: two samples could be merged")


# Ways in which the received data could be wrong, and the message that must result.


def profiles_in(arrived):
    scopes = [s for data in arrived.profiles for r in data.resource_profiles for s in r.scope_profiles]
    return [profile for scope in scopes for profile in scope.profiles]


def with_times(arrived):
    """A profile of which the times of samples are known, as of waits."""
    def has_times(profile):
        return any(t > profile.time_unix_nano for sample in profile.samples for t in sample.timestamps_unix_nano)

    return next(filter(has_times, profiles_in(arrived)))


def spans_in(arrived):
    return [span for data in arrived.traces for r in data.resource_spans for s in r.scope_spans for span in s.spans]


def kept_in(arrived):
    return next(s for s in spans_in(arrived) if "profile.id" in attributes(s))


def set_attribute(span, key, text):
    next(a for a in span.attributes if a.key == key).value.string_value = text


def first(arrived, table, index=1):
    return getattr(arrived.profiles[0].dictionary, f"{table}_table")[index]


BROKEN = {}


def broken(message):
    def add(breaks):
        BROKEN[breaks.__name__] = (message, breaks)

    return add


@broken("did not arrive")
def a_request_with_profiles_lost(arrived):
    arrived.profiles.pop()


@broken("more than once")
def a_request_with_profiles_twice(arrived):
    arrived.profiles.append(arrived.profiles[0])


@broken("did not arrive")
def an_id_changed_in_a_profile(arrived):
    profiles_in(arrived)[0].profile_id = b"0123456789abcdef"


@broken("did not arrive")
def an_id_changed_on_a_span(arrived):
    set_attribute(kept_in(arrived), "profile.id", "00" * 15 + "01")


@broken("no span names")
def an_id_missing_on_spans(arrived):
    missing = attributes(kept_in(arrived))["profile.id"]
    for span in spans_in(arrived):
        for attribute in [a for a in span.attributes if a.value.string_value == missing]:
            span.attributes.remove(attribute)


@broken("not one inside the other")
def an_id_on_a_span_elsewhere(arrived):
    kept = kept_in(arrived)
    other = next(s for s in spans_in(arrived) if s.trace_id != kept.trace_id)
    other.attributes.extend(a for a in kept.attributes if a.key == "profile.id")


@broken("arrived twice")
def a_request_with_spans_twice(arrived):
    arrived.traces.append(arrived.traces[0])


@broken("another trace")
def a_link_to_another_trace(arrived):
    for link in arrived.profiles[0].dictionary.link_table[1:]:
        link.trace_id = b"0123456789abcdef"


@broken("a span that did not arrive")
def a_link_to_an_unknown_span(arrived):
    for link in arrived.profiles[0].dictionary.link_table[1:]:
        link.span_id = b"01234567"


@broken("a span outside of it")
def a_link_to_a_span_outside(arrived):
    # A span inside the kept one has lost its parent.
    kept = {span.span_id for span in spans_in(arrived) if "profile.id" in attributes(span)}
    outside = {}
    for span in spans_in(arrived):
        if span.parent_span_id in kept:
            span.parent_span_id = b""
            del span.attributes[:]
            outside[span.trace_id] = span.span_id
    for data in arrived.profiles:
        for link in data.dictionary.link_table[1:]:
            link.span_id = outside.get(link.trace_id, link.span_id)


@broken("no sample is in")
def names_of_spans_lost(arrived):
    for profile in profiles_in(arrived):
        for sample in profile.samples:
            del sample.attribute_indices[:]


@broken("leads to none of")
def an_id_for_grafana_changed(arrived):
    key = "pyroscope.profile.id"
    set_attribute(next(s for s in spans_in(arrived) if key in attributes(s) and s.name in GUILTY), key, "01" * 8)


@broken("waits that did not arrive")
def an_id_of_waits_changed(arrived):
    key = "profile.off_cpu_id"
    set_attribute(next(s for s in spans_in(arrived) if key in attributes(s)), key, "01" * 16)


@broken("allocations that did not arrive")
def an_id_of_allocations_changed(arrived):
    key = "profile.alloc_space_id"
    set_attribute(next(s for s in spans_in(arrived) if key in attributes(s)), key, "01" * 16)


@broken(" MB in ")
def allocations_without_stacks(arrived):
    for data in arrived.profiles:
        profiles = [p for r in data.resource_profiles for s in r.scope_profiles for p in s.profiles]
        for profile in (p for p in profiles if kind(data.dictionary, p) == "alloc_space"):
            for sample in profile.samples:
                sample.stack_index = 0


@broken("profiles have")
def another_service(arrived):
    for data in arrived.profiles:
        for r in data.resource_profiles:
            for a in r.resource.attributes:
                a.value.string_value = "elsewhere"


@broken("without a key")
def keys_erased(arrived):
    for data in arrived.profiles:
        for r in data.resource_profiles:
            for a in r.resource.attributes:
                a.key, a.key_strindex = "", 0


@broken("the resource of spans is")
def spans_of_another_service(arrived):
    for data in arrived.traces:
        for r in data.resource_spans:
            del r.resource.attributes[:]


@broken(" in its lines of ")
def other_names(arrived):
    for data in arrived.profiles:
        for function in data.dictionary.function_table:
            function.name_strindex = 0


@broken(" in its lines of ")
def no_lines(arrived):
    for data in arrived.profiles:
        for location in data.dictionary.location_table:
            for line in location.lines:
                line.line = 0


@broken(" in its lines of ")
def lines_elsewhere(arrived):
    for data in arrived.profiles:
        for location in data.dictionary.location_table:
            for line in location.lines:
                line.line += 1_000_000


@broken("is not zero")
def no_zero_entry(arrived):
    first(arrived, "link", 0).span_id = b"\0" * 8


@broken("duplicate entry")
def an_entry_twice(arrived):
    arrived.profiles[0].dictionary.mapping_table.append(first(arrived, "mapping"))


@broken("nothing refers to")
def an_entry_unused(arrived):
    arrived.profiles[0].dictionary.string_table.append("unused")


@broken("entry 1000000 of")
def an_index_out_of_range(arrived):
    first(arrived, "location").mapping_index = 1_000_000


@broken("outside the time of its profile")
def a_profile_too_short(arrived):
    with_times(arrived).duration_nano = 1


@broken("samples of the shapes")
def a_sample_of_nothing(arrived):
    with_times(arrived).samples.add(stack_index=1, link_index=1)


@broken("two samples could be merged")
def a_sample_twice(arrived):
    samples = with_times(arrived).samples
    samples.append(samples[0])


@broken("the Collector printed")
def nothing_printed(arrived):
    arrived.log = ""


def detects_broken_data(arrived):
    for name, (message, breaks) in BROKEN.items():
        changed = copy.deepcopy(arrived)
        breaks(changed)
        try:
            check_arrived(changed)
        except Wrong as wrong:
            check(message in str(wrong), f"{name}: expected `{message}`, and not `{wrong}`")
        else:
            raise Wrong(f"{name}: not noticed")
    print(f"{len(BROKEN)} ways to break the data, all detected")


def read(directory):
    """Checks all ways that are in the directory."""

    def messages(kind, pattern):
        return [kind.FromString(path.read_bytes()) for path in sorted(directory.glob(pattern))]

    name, log = directory.name, None
    # Which endpoint of the server the requests must have used.
    endpoints = {
        "collector-grpc": ["grpc", "http-gzip"],
        "collector-http": ["grpc", "http-gzip"],
        "direct-grpc": ["grpc"],
        "direct-http": ["http-gzip"],
        "files": ["http-plain"],
    }[name]
    arrived_by = {re.match(r"(.*)-(profiles|traces)-", path.name)[1] for path in directory.glob("*.pb")}
    check(arrived_by == set(endpoints), f"{name}: requests arrived by {arrived_by}, expected {endpoints}")
    if name.startswith("collector"):
        log = (directory / "collector.log").read_text()
    for endpoint in endpoints:
        profiles = f"{endpoint}-profiles-*.pb"
        if name == "files":
            check(messages(ProfilesData, profiles) == [], "profiles were sent, not only written to files")
            profiles = "profiles/*.otlp"
        traces = messages(TracesData, f"{endpoint}-traces-*.pb")
        yield Arrived(f"{name}, {endpoint}", messages(ProfilesData, profiles), traces, log)


def main(directory):
    try:
        everything = [arrived for run in sorted(directory.iterdir()) for arrived in read(run)]
        for arrived in everything:
            try:
                found, spans = check_arrived(arrived)
            except Wrong as wrong:
                raise Wrong(f"{arrived.name}: {wrong}") from wrong
            print(f"{arrived.name}: {len(found)} profiles in {len(arrived.profiles)} messages, {len(spans)} spans")
        detects_broken_data(everything[0])
    except Wrong as wrong:
        sys.exit(f"{wrong}\nWhat arrived is in {directory}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
