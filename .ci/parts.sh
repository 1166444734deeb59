# For .ci/run and .ci/nightly: parts that are timed, and what was left out, said at the end. Sourced.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What the parts, which run in shells of their own, leave for the end.
notes=$(mktemp -d)
touch "$notes/times" "$notes/skipped" "$notes/failed"

# What runs beside the parts, in a process group of its own; of the lowest priority.
beside() { # LOG COMMAND [ARGUMENT...]
    local log=$1
    shift
    set -m
    nice -n 19 "$@" >"$log" 2>&1 &
    set +m
    helper=$!
}
helper=

say() {
    local status=$?
    [[ -z $helper || " $(jobs -rp | tr '\n' ' ')" != *" $helper "* ]] || kill -TERM -- "-$helper" || true
    printf '\n=== how long it took\n'
    cat "$notes/times"
    printf '%6d s  all\n' "$SECONDS"
    if [ -s "$notes/skipped" ]; then
        printf '\n=== skipped\n'
        sort -u "$notes/skipped"
    else
        printf '\n=== nothing was skipped\n'
    fi
    if [ -s "$notes/failed" ]; then
        printf '\n=== FAILED\n'
        cat "$notes/failed"
        status=1
    elif [ "$status" = 0 ]; then
        printf '\n=== all is well%s\n' "$([ ! -s "$notes/skipped" ] || echo ", but for what was skipped")"
    fi
    rm -rf "$notes"
    exit "$status"
}
trap say EXIT
# A signal ends it as a failure does, and not as success.
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# part NAME COMMAND [ARGUMENT...]: in a shell of its own, where a failure of any line is one of all. The first
# that fails ends the script, unless GO_ON is set.
part() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n=== %s (%d s)\n' "$name" "$SECONDS"
    # Not as part of a condition, in which `set -e` would mean nothing.
    set +e
    (
        # What ends the script says what there is to say.
        trap - EXIT
        set -e
        "$@"
    )
    status=$?
    set -e
    printf '%6d s  %s\n' $((SECONDS - start)) "$name" >>"$notes/times"
    if [ "$status" != 0 ]; then
        echo "$name (status $status)" | tee -a "$notes/failed"
        [ -n "${GO_ON:-}" ] || exit 1
    fi
}

# skip WHAT WHY: nothing is left out without a word.
skip() {
    echo "$1: $2" | tee -a "$notes/skipped"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# install COMMAND=PACKAGE...: the Debian packages of those commands that are not there.
install_missing() {
    local missing=() pair
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    if command -v python3 >/dev/null; then
        python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    else
        missing+=(python3-venv)
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    as_root apt-get update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y "${missing[@]}"
}

install_rust() {
    command -v cargo >/dev/null ||
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal
    rustup component add rustfmt clippy
}
export PATH="$HOME/.cargo/bin:$PATH"

# The one of the distribution can be older than those that fetch a newer one by themselves: the newer one is a module.
go_version=v0.0.1-go1.26.0.linux-amd64
go_folder=$PWD/target/go/golang.org/toolchain@$go_version
install_go() {
    install_missing go=golang-go
    if printf '1.21\n%s\n' "$(go env GOVERSION | sed 's/^go//')" | sort -VC; then
        return 0
    fi
    [ "$(uname -m)" = x86_64 ] || { echo "Go 1.21 or later must be installed on this machine" >&2 && return 1; }
    GOMODCACHE=$PWD/target/go GOFLAGS=-modcacherw GONOSUMDB='*' \
        go mod download "golang.org/toolchain@$go_version"
    chmod -R u+x "$go_folder/bin" "$go_folder/pkg/tool"
}
export PATH="$go_folder/bin:$PATH"

# The disk of a clean machine can be small, and most of what is written there is debug information: line tables
# are all that a stack shows of it.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=line-tables-only

# Tests that need perf events fail where they are refused, if this is set, instead of passing by.
look_for_perf() {
    if python3 .ci/perf_allowed.py; then
        export TRACING_PROFILING_TEST_PERF=1
    else
        unset TRACING_PROFILING_TEST_PERF
        skip "all that needs perf events: the source perf, instructions, figures" "they are refused here"
    fi
}

# Tests that need these pass by where there are none.
look_for_tools() {
    command -v objcopy >/dev/null || skip "separate debug files" "there is no objcopy"
    command -v prlimit >/dev/null || skip "tight limits of memory" "there is no prlimit"
    unshare --mount true 2>/dev/null || skip "a full file system" "nobody may mount here"
}
