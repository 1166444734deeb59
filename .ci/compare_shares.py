"""compare_shares.py OURS SAMPLES THEIRS: compares the output of `go tool pprof -top` for a profile of the layer, with
that number of samples, with the functions of the samples that `perf script` lists. Fails unless they agree on the
ten hottest functions and on their shares, within sampling error."""

import collections
import math
import re
import sys

HOTTEST = 10
# Exceeded by chance once in two million times.
STANDARD_ERRORS = 5


def short(name):
    """The last component of a function's path, whether perf could demangle it or not."""
    mangled = re.fullmatch(r"_ZN.*?([A-Za-z_]+)17h[0-9a-f]{16}E", name)
    if mangled:
        return mangled.group(1)
    return re.sub(r"::h[0-9a-f]{16}$", "", name).split("::")[-1]


def ours(path):
    functions = collections.Counter()
    lines = iter(open(path))
    # flat flat% sum% cum cum% name
    next(line for line in lines if "flat%" in line)
    for line in lines:
        flat, _, _, _, _, name = line.split(maxsplit=5)
        functions[short(name.strip())] += float(flat.removesuffix("ns"))
    return functions


def theirs(path):
    # The address and, if known, the function.
    lines = (line.split(maxsplit=1) for line in open(path) if line.strip())
    return collections.Counter(short(words[-1].strip()) for words in lines)


first, second = ours(sys.argv[1]), theirs(sys.argv[3])
counts = [float(sys.argv[2]), sum(second.values())]
shares = [
    {name: value / sum(functions.values()) for name, value in functions.items()}
    for functions in (first, second)
]


def share(side, name):
    return shares[side].get(name, 0)


def bound(*shares_and_counts):
    """How far two equal shares may appear apart, by sampling error, with these numbers of samples."""
    total = sum(count for _, count in shares_and_counts)
    p = sum(share * count for share, count in shares_and_counts) / total
    return STANDARD_ERRORS * math.sqrt(p * (1 - p) * sum(1 / n for _, n in shares_and_counts))


hottest = [sorted(side, key=side.get, reverse=True)[:HOTTEST] for side in shares]
problems = []
print(f"{'function':>24}  ours, {counts[0]:.0f}  theirs, {counts[1]:.0f}  difference  limit")
for name in sorted(set().union(*hottest), key=lambda name: -share(0, name)):
    a, b = share(0, name), share(1, name)
    most = bound((a, counts[0]), (b, counts[1]))
    print(f"{name:>24} {a:12.2%} {b:12.2%} {abs(a - b):9.2%} {most:8.2%}")
    if abs(a - b) > most:
        problems.append(f"the shares of {name} differ")
    # Not among the ten: an error only if it is clearly cooler than the tenth, beyond sampling error.
    for side in 0, 1:
        if name not in hottest[side]:
            tenth, own = share(side, hottest[side][-1]), share(side, name)
            if tenth - own > bound((tenth, counts[side]), (own, counts[side])):
                problems.append(f"{name} is among the ten hottest on one side alone")
if len(hottest[0]) < HOTTEST:
    problems.append("there are fewer than ten functions")
print("\n".join(problems) or "they agree")
sys.exit(bool(problems))
