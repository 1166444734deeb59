"""interop.py COLLECTOR SHOP DIRECTORY PROFCHECK: runs the shop once for each way by which it can export, stores all
requests that arrive in the directory, and checks them with interop_check.py and, if available, profcheck."""

import gzip
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
    ExportProfilesServiceRequest,
    ExportProfilesServiceResponse,
)
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2_grpc import (
    ProfilesServiceServicer,
    add_ProfilesServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

import interop_check
from read_otlp import TURNED, kind

PROFILES_PATH = f"/{ExportProfilesServiceRequest.DESCRIPTOR.file.package.rsplit('.', 1)[1]}/profiles"
# A limit for runs that never end; no result depends on how long something takes.
PATIENCE_S = 300


class Backend:
    """Receives profiles and traces by gRPC and by HTTP, and writes each request to a directory."""

    def __init__(self, directory):
        self.directory = directory
        self.numbers = itertools.count()
        self.pool = ThreadPoolExecutor(8)
        self.grpc = grpc.server(self.pool)
        self.grpc_port = self.grpc.add_insecure_port("127.0.0.1:0")
        profiles = self._by_grpc(ProfilesServiceServicer, "profiles", ExportProfilesServiceResponse)
        add_ProfilesServiceServicer_to_server(profiles, self.grpc)
        traces = self._by_grpc(TraceServiceServicer, "traces", ExportTraceServiceResponse)
        add_TraceServiceServicer_to_server(traces, self.grpc)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._by_http())
        self.http_port = self.http.server_port

    def __enter__(self):
        self.grpc.start()
        threading.Thread(target=self.http.serve_forever).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.grpc.stop(None).wait()

    def keep(self, way, signal_name, message):
        name = f"{way}-{signal_name}-{next(self.numbers):04}.pb"
        # Renamed only once it is complete.
        whole = self.directory / name
        whole.with_suffix(".part").write_bytes(message.SerializeToString())
        whole.with_suffix(".part").rename(whole)

    def _by_grpc(self, servicer, signal_name, response):
        keep = self.keep

        class ByGrpc(servicer):
            def Export(self, request, context):
                keep("grpc", signal_name, request)
                return response()

        return ByGrpc()

    def _by_http(self):
        keep = self.keep

        class ByHttp(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                encoding = self.headers.get("content-encoding", "plain")
                if encoding == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf", self.headers
                if self.path == PROFILES_PATH:
                    signal_name = "profiles"
                    request, response = ExportProfilesServiceRequest, ExportProfilesServiceResponse
                else:
                    assert self.path == "/v1/traces", self.path
                    signal_name = "traces"
                    request, response = ExportTraceServiceRequest, ExportTraceServiceResponse
                keep(f"http-{encoding}", signal_name, request.FromString(body))
                answer = response().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        return ByHttp


class Collector:
    """The Collector with the configuration for users, in front of the backend."""

    def __init__(self, program, backend, name="collector", grpc_port=0, http_port=0):
        self.log = backend.directory / f"{name}.log"
        config = Path(__file__).parent.parent / "examples/collector/collector.yaml"
        variables = {
            # The Collector logs the ports that it was given.
            "OTLP_GRPC_PORT": str(grpc_port),
            "OTLP_HTTP_PORT": str(http_port),
            "BACKEND_GRPC": f"127.0.0.1:{backend.grpc_port}",
            "BACKEND_HTTP": f"http://127.0.0.1:{backend.http_port}",
        }
        self.process = subprocess.Popen(
            [program, "--config", config, "--feature-gates=service.profilesSupport"],
            env=os.environ | variables,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )

    def __enter__(self):
        try:
            deadline = time.monotonic() + PATIENCE_S
            while "Everything is ready" not in self.log.read_text():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the Collector does not start:\n{self.log.read_text()}")
                time.sleep(0.05)
        except BaseException:
            self.process.kill()
            raise
        text = self.log.read_text()
        of = {p: re.search(rf'Starting {p} server.*"127\.0\.0\.1:(\d+)"', text) for p in ("GRPC", "HTTP")}
        assert all(of.values()), text
        self.grpc_port, self.http_port = int(of["GRPC"][1]), int(of["HTTP"][1])
        return self

    def __exit__(self, failed, *_):
        if failed:
            self.process.kill()
            return
        # The Collector forwards what it has before it exits, so everything has arrived by then.
        self.process.terminate()
        if self.process.wait(PATIENCE_S) != 0:
            sys.exit(f"the Collector ends with {self.process.returncode}:\n{self.log.read_text()}")


def run_shop(program, directory, protocol, target, variables, during=lambda: None):
    """Runs the shop with the variables that a user would set."""
    port = target.grpc_port if protocol == "grpc" else target.http_port
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "TRACING_PROFILING"))}
    variables = inherited | variables | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=interop,service.version=1.2.3",
    }
    with (directory / "shop.log").open("wb") as log:
        process = subprocess.Popen([program], env=variables, cwd=directory, stdout=log, stderr=log)
        try:
            during()
            code = process.wait(PATIENCE_S)
        finally:
            process.kill()
    if code != 0:
        sys.exit(f"the shop ends with {code}:\n{(directory / 'shop.log').read_text()}")


def restarted(collector, shop, directory, protocol):
    """Restarts the Collector while the shop runs: profiles kept in the meantime arrive nevertheless. (Spans do not: the
    exporter of opentelemetry-otlp drops them.)"""
    directory.mkdir(parents=True)
    log = directory / "shop.log"

    def until(kept):
        deadline = time.monotonic() + PATIENCE_S
        while log.read_text().count("kept `") < kept:
            if time.monotonic() > deadline:
                sys.exit(f"the shop does not keep {kept} spans:\n{log.read_text()}")
            time.sleep(0.05)

    with Backend(directory) as backend, ExitStack() as collectors:
        first = collectors.enter_context(Collector(collector, backend))

        def restart():
            until(kept=1)
            first.__exit__(None)
            until(kept=3)
            again = Collector(collector, backend, "collector-again", first.grpc_port, first.http_port)
            collectors.enter_context(again)

        run_shop(shop, directory, protocol, first, {}, restart)
    promised = set(re.findall(r"profile\.id=([0-9a-f]{32})", log.read_text()))
    arrived = {}
    for path in directory.glob("*-profiles-*.pb"):
        data = ExportProfilesServiceRequest.FromString(path.read_bytes())
        for resource in data.resource_profiles:
            for scope in resource.scope_profiles:
                for profile in scope.profiles:
                    # Each kind but on-CPU has the id with one bit turned.
                    turned = TURNED.get(kind(data.dictionary, profile), 0)
                    profile_id = f"{int(profile.profile_id.hex(), 16) ^ turned:032x}"
                    arrived.setdefault(profile_id, []).append(path.name.split("-")[0])
    if len(promised) < 4 or not promised <= arrived.keys():
        sys.exit(f"promised {promised}, arrived {arrived}\nWhat arrived is in {directory}")
    # At most twice per way: if the first Collector had received it and could not acknowledge it.
    print(f"{directory.name}: all {len(promised)} profiles arrived, as {sum(map(len, arrived.values()))}")


def profcheck(program, directory):
    """Checks what the layer sends and writes, and what the Collector forwards by gRPC. By HTTP the Collector (v0.162)
    turns the keys of resources into references, which profcheck does not count as such."""
    files = [*directory.glob("*/grpc-profiles-*.pb"), *directory.glob("direct-http/*-profiles-*.pb")]
    files += directory.glob("files/profiles/*.otlp")
    assert len(files) >= 16, files
    for file in files:
        checked = subprocess.run(
            [program, "-check-dupes", "-check-orphans", file], capture_output=True, text=True
        )
        if checked.returncode != 0:
            sys.exit(f"profcheck rejects {file}:\n{checked.stdout}{checked.stderr}")
    print(f"profcheck accepts {len(files)} files")


def main():
    # With a handler, so that the child processes are ended as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    collector, shop, directory, checker = (Path(argument).absolute() for argument in sys.argv[1:])
    shutil.rmtree(directory, ignore_errors=True)
    gzipped = {"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}
    to_files = {"OTEL_PROFILES_EXPORTER": "directory", "TRACING_PROFILING_DIR": "profiles"}
    for name, protocol, variables in [
        ("collector-grpc", "grpc", gzipped),
        ("collector-http", "http/protobuf", {}),
        ("direct-grpc", "grpc", {}),
        ("direct-http", "http/protobuf", gzipped),
        ("files", "http/protobuf", to_files),
    ]:
        print(f"{name}: the shop runs", flush=True)
        of_run = directory / name
        of_run.mkdir(parents=True)
        with Backend(of_run) as backend:
            if name.startswith("collector"):
                with Collector(collector, backend) as target:
                    run_shop(shop, of_run, protocol, target, variables)
            else:
                run_shop(shop, of_run, protocol, backend, variables)
    interop_check.main(directory)
    for protocol in ("grpc", "http/protobuf"):
        print(f"collector restarted, {protocol}: the shop runs", flush=True)
        restarted(collector, shop, directory / f"restarted-{protocol[:4]}", protocol)
    if checker.exists():
        profcheck(checker, directory)


if __name__ == "__main__":
    main()
