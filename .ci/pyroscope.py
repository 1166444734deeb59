"""pyroscope.py DIRECTORY [URL]: checks what Pyroscope answers when it is asked as Grafana asks: what the ids on spans lead
to, and in DIRECTORY/process, the CPU time by local root. DIRECTORY has what the example `links` has written: its lines as
spans.jsonl, and its profiles as .otlp files; DIRECTORY/process the continuous profiles of the example `slow_requests`.

With a URL, sends the profiles to that Pyroscope, asks it, and records its answers in DIRECTORY/answers.json. Without
one, answers as Pyroscope does, by the links of the samples; where there are recorded answers, these must be the same."""

import json
import sys
import time
import urllib.request
from pathlib import Path

from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData

CPU = "process_cpu:cpu:nanoseconds:cpu:nanoseconds"
PROCESS = "cpu:cpu:nanoseconds:cpu:nanoseconds"
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
# Of the process: what the graph of a local root has.
ROOTS = {"GET /bundles": "count_cheap_bundles", "GET /similar": "sqlite3VdbeExec"}
BUSY = set().union(*(functions for _, functions in EXPECTED.values()))
# A limit for answers that never come; no result depends on it.
PATIENCE_S = 120


def functions_of(dictionary, sample):
    for location in dictionary.stack_table[sample.stack_index].location_indices:
        for line in dictionary.location_table[location].lines:
            function = dictionary.function_table[line.function_index]
            yield dictionary.string_table[function.name_strindex]


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
                functions.update(functions_of(dictionary, sample))
        return [sorted(functions), total]

    def ask_process(self, root):
        """The functions in the flame graph of a local root (of all, if it is `None`), sorted, and the CPU time."""
        functions, total = set(), 0
        for dictionary, labels, sample in self.process_samples():
            if root not in (None, labels.get("local_root")):
                continue
            total += sum(sample.values)
            functions.update(functions_of(dictionary, sample))
        return [sorted(functions), total]

    def ask_series(self, label):
        """The CPU time by the value of a label, "" where there is none."""
        times = {}
        for _, labels, sample in self.process_samples():
            value = labels.get(label, "")
            times[value] = times.get(value, 0) + sum(sample.values)
        return times

    def process_samples(self):
        for dictionary, profile in self.profiles():
            if dictionary.string_table[profile.sample_type.type_strindex] != "cpu":
                continue
            for sample in profile.samples:
                attributes = [dictionary.attribute_table[index] for index in sample.attribute_indices]
                labels = {
                    dictionary.string_table[one.key_strindex]: one.value.string_value
                    for one in attributes
                }
                yield dictionary, labels, sample


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

    def query(self, method, profile_type, labels=(), **more):
        now = int(time.time() * 1000)
        labels = {"service_name": self.service, **dict(labels)}
        question = {
            "profileTypeID": profile_type,
            "labelSelector": "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}",
            "start": now - 3_600_000,
            "end": now + 60_000,
            **more,
        }
        path = f"querier.v1.QuerierService/{method}"
        return json.loads(self.post(path, json.dumps(question).encode(), "application/json"))

    def graph(self, *question, **more):
        graph = self.query(*question, **more, maxNodes=16384).get("flamegraph", {})
        names = set(graph.get("names", [])) - {"total"}
        return [sorted(names), int(graph.get("total", 0))]

    def ask(self, profile_type, span):
        return self.graph("SelectMergeSpanProfile", profile_type, spanSelector=[span])

    def ask_process(self, root):
        labels = {} if root is None else {"local_root": root}
        return self.graph("SelectMergeStacktraces", PROCESS, labels)

    def ask_series(self, label):
        times = {}
        for series in self.query("SelectSeries", PROCESS, groupBy=[label], step=10)["series"]:
            value = next((one["value"] for one in series.get("labels", [])), "")
            times[value] = sum(int(point["value"]) for point in series["points"])
        return times


def ask_until(expected, ask):
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = ask()
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


def check_process(ask_process, ask_series):
    """Checks what is answered on continuous profiles."""
    functions, total = ask_process(None)
    print(f"all: {total / 1e6:.0f} ms, {len(functions)} functions")
    by_root, by_thread = ask_series("local_root"), ask_series("thread.name")
    assert sum(by_root.values()) == sum(by_thread.values()) == total > 0, (by_root, by_thread)
    for root, function in ROOTS.items():
        functions, time_ns = ask_process(root)
        print(f"{root}: {time_ns / 1e6:.0f} ms")
        assert time_ns == by_root[root], (root, time_ns)
        assert any(function in name for name in functions), f"{root}: no {function}"


class Answers:
    """Answers from the profiles in a directory. If a server is asked, too, or its answers are recorded, it must answer the
    same."""

    def __init__(self, directory, urls):
        self.files, self.recorded = Files(directory), directory / "answers.json"
        self.server = Pyroscope(urls[0], directory, self.files.service()) if urls else None
        is_recorded = not urls and self.recorded.exists()
        self.answers = json.loads(self.recorded.read_text()) if is_recorded else {}

    def ask(self, *question):
        name, *arguments = question
        expected = getattr(self.files, name)(*arguments)
        key = " ".join(map(str, question))
        if self.server:
            asked = getattr(self.server, name)
            self.answers[key] = ask_until(expected, lambda: asked(*arguments))
        if self.answers:
            answer = self.answers[key]
            assert answer == expected, f"{key}: Pyroscope answers {answer}, and not {expected}"
        return expected

    def end(self):
        if self.server:
            self.recorded.write_text(json.dumps(self.answers, indent=1) + "\n")
        if self.answers:
            print(f"{len(self.answers)} answers of Pyroscope are as expected")


def main():
    directory, urls = Path(sys.argv[1]), sys.argv[2:]
    spans = [json.loads(line) for line in (directory / "spans.jsonl").read_text().splitlines()]
    of_spans, of_process = Answers(directory, urls), Answers(directory / "process", urls)
    check(spans, of_spans.files.ids(), lambda *question: of_spans.ask("ask", *question))
    of_spans.end()
    check_process(
        lambda root: of_process.ask("ask_process", root),
        lambda label: of_process.ask("ask_series", label),
    )
    of_process.end()


main()
