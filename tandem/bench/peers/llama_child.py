"""llama.cpp, driven line by line: run by the interpreter that has llama-cpp-python, which need not have Tandem.

The one argument is JSON: model (a GGUF), context (tokens), eos (ids that end an answer). Says what it is in one line of
JSON; then answers each line {"prompt": ids, "max_tokens": n} with {"token_ids", "seconds", "first_seconds"}: greedy,
seconds from the prompt's first token to the answer's last, and to its first.
"""

import json
import os
import sys
import time


def main() -> None:
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # llama.cpp writes to standard output what is not a reply
    import llama_cpp

    # Its own default is half of the cores.
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    model = llama_cpp.Llama(
        settings["model"], n_ctx=settings["context"], n_threads=threads, n_threads_batch=threads, verbose=False
    )
    print(json.dumps({"about": f"llama-cpp-python {llama_cpp.__version__}, {threads} threads"}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        eos = set(settings["eos"])
        token_ids: list[int] = []
        started = time.perf_counter()
        first = 0.0
        for token in model.generate(request["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter()
            token_ids.append(token)
            if token in eos or len(token_ids) == request["max_tokens"]:
                break
        seconds = time.perf_counter() - started
        reply = {"token_ids": token_ids, "seconds": seconds, "first_seconds": first - started}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main()
