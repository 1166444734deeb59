# For .ci/run and .ci/nightly, which source it: runs parts, times them, and reports at the end what was skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Notes for the final report. Parts run in subshells, so they cannot set variables.
notes=$(mktemp -d)
touch "$notes/times" "$notes/skipped" "$notes/failed"

report() {
    local status=$?
    end_beside
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
        printf '\n=== passed%s\n' "$([ ! -s "$notes/skipped" ] || echo ", except for what was skipped")"
    fi
    rm -rf "$notes"
    exit "$status"
}
trap report EXIT
# A signal counts as a failure, not as success.
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# part NAME COMMAND [ARGUMENT...]: runs the command in a subshell, in which any failing line fails the part. The first
# failing part ends the script, unless GO_ON is set.
part() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n=== %s (%d s)\n' "$name" "$SECONDS"
    # Not in a condition, where `set -e` has no effect.
    set +e
    (
        # Only the outer shell reports.
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

# beside NAME COMMAND [ARGUMENT...]: begins a part that no other one needs, at the lowest priority. `join_beside` waits
# for all of them, and prints what they printed.
beside_names=()
beside_jobs=()
beside() {
    local name=$1 log=$notes/beside.${#beside_jobs[@]}
    shift
    # In a process group of its own, so that all its processes can be ended.
    set -m
    (
        trap - EXIT HUP INT TERM
        set +e
        (
            set -e
            renice -n 19 -p "$BASHPID" >/dev/null
            "$@"
        )
        echo $? >"$log.status"
    ) >"$log" 2>&1 </dev/null &
    set +m
    beside_names+=("$name")
    beside_jobs+=($!)
}

# One that was killed has no status, which fails the part. Its number alone can be that of another process by then.
join_one() {
    until [ -s "$notes/beside.$1.status" ] || ! kill -0 "${beside_jobs[$1]}" 2>/dev/null; do
        sleep 1
    done
    cat "$notes/beside.$1"
    return "$(cat "$notes/beside.$1.status")"
}

join_beside() {
    local number
    for number in "${!beside_jobs[@]}"; do
        part "${beside_names[$number]}" join_one "$number"
    done
}

end_beside() {
    local number
    for number in "${!beside_jobs[@]}"; do
        [ -s "$notes/beside.$number.status" ] || kill -TERM -- "-${beside_jobs[$number]}" 2>/dev/null || true
    done
}

# skip WHAT WHY: reports what is left out.
skip() {
    echo "$1: $2" | tee -a "$notes/skipped"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# install COMMAND=PACKAGE...: installs the Debian packages of the commands that are missing.
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

# The Go of the distribution can be too old to fetch a newer toolchain by itself: the newer one is then fetched as a
# module.
go_version=v0.0.1-go1.26.0.linux-amd64
go_dir=$PWD/target/go/golang.org/toolchain@$go_version
install_go() {
    install_missing go=golang-go
    if printf '1.21\n%s\n' "$(go env GOVERSION | sed 's/^go//')" | sort -VC; then
        return 0
    fi
    [ "$(uname -m)" = x86_64 ] || { echo "Go 1.21 or later must be installed on this machine" >&2 && return 1; }
    GOMODCACHE=$PWD/target/go GOFLAGS=-modcacherw GONOSUMDB='*' \
        go mod download "golang.org/toolchain@$go_version"
    chmod -R u+x "$go_dir/bin" "$go_dir/pkg/tool"
}
export PATH="$go_dir/bin:$PATH"

# The disk of a clean machine can be small, and most build output is debug information. Line tables are all that stacks
# need.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=line-tables-only

# With this variable set, tests that need perf events fail where these are refused, instead of passing without them.
check_perf() {
    if python3 .ci/perf_allowed.py; then
        export PROFILING_TEST_PERF=1
    else
        unset PROFILING_TEST_PERF
        skip "everything that needs perf events: the source perf, instructions, figures" "they are refused here"
    fi
}

# Tests that need these tools pass without them.
check_tools() {
    command -v objcopy >/dev/null || skip "separate debug files" "there is no objcopy"
    command -v dwz >/dev/null || skip "supplementary debug files" "there is no dwz"
    command -v xz >/dev/null || skip "symbols embedded in libraries" "there is no xz"
    compgen -G '/usr/lib*/*/libtcmalloc.so.4' >/dev/null || compgen -G '/usr/lib*/libtcmalloc.so.4' >/dev/null ||
        skip "an allocator that walks stacks: tcmalloc" "there is no libtcmalloc.so.4"
    command -v prlimit >/dev/null || skip "tight memory limits" "there is no prlimit"
    unshare --mount true 2>/dev/null || skip "a full file system" "mounting is not permitted here"
}
