"""Two pipelined single-core CPU devices against one: prefill of one prompt, in one run.

    python tests/perf/two_devices.py [MODEL] [--tokens 1024] [--repetitions 5]

Prints tokens per second of both (medians, A B A B) and their ratio. Leave the machine alone
meanwhile.
"""

import argparse
from statistics import median

from peers import Job, Ours, alternate, ratio

from gguf_pp import fetch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    job = Job(args.model, args.tokens, 1)
    path = str(fetch.resolve(args.model))
    one = Ours(path, job, devices=["cpu:0"], threads="1", exact=args.exact)
    two = Ours(path, job, devices=["cpu:0", "cpu:1"], threads="1", exact=args.exact)
    results = alternate([lambda i: two(job, i), lambda i: one(job, i)], args.repetitions)
    print(
        f"{job.title}: two devices {median(results[0]):.1f} tokens/s, "
        f"one device {median(results[1]):.1f} tokens/s, ratio {ratio(*results):.2f}"
    )


if __name__ == "__main__":
    main()
