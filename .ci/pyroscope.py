"""pyroscope.py DIRECTORY [URL]: checks what the ids on spans lead to in Pyroscope, asked as Grafana asks. DIRECTORY has
what the example `links` has written: its lines as spans.jsonl, and its profiles as .otlp files.

With a URL, sends the profiles to that Pyroscope, asks it, and records its answers in DIRECTORY/answers.json. Without
one, answers as Pyroscope does, by the links of the samples; where there are recorded answers, these must be the same."""

import json
import sys
import time
import urllib.request
from pathlib import Path

from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData

CPU = "process_cpu:cpu:nanoseconds:cpu:nanoseconds"
OFF_CPU = "off_cpu:off_cpu:nanoseconds:off_cpu:nanoseconds"
# For each span with CPU time: the span that its attribute names (`None`: one that was not kept), and those of the
# example's functions that its graph has.
EXPECTED = {
    "short children": ("short children", {"run_query"}),
    "alone": ("alone", {"serve_alone"}),
    "early child": ("root of an early child", {"load_early", "render_late"}),
    "root of an early child": ("root of an early child", {"load_early", "render_late"}),
    "child of no kept root": (None, {"load_orphan"}),
    "stream a": ("stream a", {"serve_stream_a"}),
    "stream b": ("stream b", {"serve_stream_b"}),
}
BUSY = set().union(*(functions for _, functions in EXPECTED.values()))
# A limit for answers that never come; no result depends on it.
PATIENCE_S = 120


class Files:
    """Answers from the profiles in a directory."""

    def __init__(self, directory):
        paths = sorted(directory.glob("*.otlp"))
        assert paths, f"no profiles in {directory}"
        self.data = [ProfilesData.FromString(path.read_bytes()) for path in paths]

    def service(self):
        attributes = self.data[0].resource_profiles[0].resource.attributes
        return next(one.value.string_value for one in attributes if one.key == "service.name")

    def profiles(self):
        for data in self.data:
            for resource in data.resource_profiles:
                for scope in resource.scope_profiles:
                    yield from ((data.dictionary, profile) for profile in scope.profiles)

    def ids(self):
        return {profile.profile_id.hex() for _, profile in self.profiles()}

    def ask(self, profile_type, span):
        """The functions in a span's flame graph, sorted, and the time in it."""
        functions, total = set(), 0
        for dictionary, profile in self.profiles():
            kind = dictionary.string_table[profile.sample_type.type_strindex]
            assert kind in ("samples", "off_cpu", "await", "scheduling_delay"), kind
            if kind != ("off_cpu" if profile_type == OFF_CPU else "samples"):
                continue
            for sample in profile.samples:
                if dictionary.link_table[sample.link_index].span_id.hex() != span:
                    continue
                count = len(sample.timestamps_unix_nano)
                total += sum(sample.values) or count * profile.period
                for location in dictionary.stack_table[sample.stack_index].location_indices:
                    for line in dictionary.location_table[location].lines:
                        function = dictionary.function_table[line.function_index]
                        functions.add(dictionary.string_table[function.name_strindex])
        return [sorted(functions), total]


class Pyroscope:
    """Asks a server. What is stored can take a moment to be found."""

    def __init__(self, url, directory, service):
        self.url, self.service = url.rstrip("/"), service
        for path in sorted(directory.glob("*.otlp")):
            self.post("v1development/profiles", path.read_bytes(), "application/x-protobuf")

    def post(self, path, body, content_type):
        headers = {"content-type": content_type}
        request = urllib.request.Request(f"{self.url}/{path}", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read()

    def ask(self, profile_type, span):
        now = int(time.time() * 1000)
        question = {
            "profileTypeID": profile_type,
            "labelSelector": f'{{service_name="{self.service}"}}',
            "spanSelector": [span],
            "start": now - 3_600_000,
            "end": now + 60_000,
            "maxNodes": 16384,
        }
        path = "querier.v1.QuerierService/SelectMergeSpanProfile"
        answer = self.post(path, json.dumps(question).encode(), "application/json")
        graph = json.loads(answer).get("flamegraph", {})
        names = set(graph.get("names", [])) - {"total"}
        return [sorted(names), int(graph.get("total", 0))]

    def ask_until(self, expected, profile_type, span):
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self.ask(profile_type, span)
            if answer == expected or time.monotonic() > end:
                return answer
            time.sleep(1)


def check(spans, ids, ask):
    """Checks the spans' attributes, and what `ask` answers."""
    by_name = {span["name"]: span for span in spans}
    assert len(by_name) == len(spans), "each name once"
    assert set(EXPECTED) | {"only waits"} <= set(by_name), by_name.keys()
    for name, span in by_name.items():
        if "profile.off_cpu_id" in span:
            assert span["profile.off_cpu_id"] in ids, f"{name}: no profile of its waits"
        grafana = span.get("pyroscope.profile.id")
        if grafana is None:
            assert name not in EXPECTED, f"{name}: no pyroscope.profile.id"
            continue
        names, total = ask(CPU, grafana)
        found = {busy for busy in BUSY if any(busy in function for function in names)}
        print(f"{name}: {total / 1e6:.0f} ms in {', '.join(sorted(found))}")
        assert total > 0, f"{name}: an empty graph"
        if name in EXPECTED:
            linked, functions = EXPECTED[name]
            assert found == functions, f"{name}: {found}"
            assert linked is None or grafana == by_name[linked]["span"], f"{name}: {grafana}"
    waits = by_name["only waits"]
    assert "pyroscope.profile.id" not in waits and "profile.off_cpu_id" in waits, waits
    assert ask(CPU, waits["span"]) == [[], 0]
    names, total = ask(OFF_CPU, waits["span"])
    print(f"only waits: {total / 1e6:.0f} ms off-CPU")
    assert total >= 250e6 and any("sleep" in name for name in names), (names, total)


def main():
    directory, urls = Path(sys.argv[1]), sys.argv[2:]
    spans = [json.loads(line) for line in (directory / "spans.jsonl").read_text().splitlines()]
    files, recorded = Files(directory), directory / "answers.json"
    answers = {}
    if urls:
        server = Pyroscope(urls[0], directory, files.service())
    elif recorded.exists():
        answers = json.loads(recorded.read_text())

    def ask(profile_type, span):
        expected = files.ask(profile_type, span)
        if urls:
            answers[f"{profile_type} {span}"] = server.ask_until(expected, profile_type, span)
        if answers:
            answer = answers[f"{profile_type} {span}"]
            assert answer == expected, f"{span}: Pyroscope answers {answer}, and not {expected}"
        return expected

    check(spans, files.ids(), ask)
    if urls:
        recorded.write_text(json.dumps(answers, indent=1) + "\n")
    if answers:
        print(f"{len(answers)} answers of Pyroscope are as expected")


main()
