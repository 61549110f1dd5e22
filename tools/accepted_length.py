"""Mean accepted length of the demo draft on prompts, by the embedded engine.

    python tools/accepted_length.py NAME=FILE.jsonl ... [--count 50] [--temperatures 0 1] [--device cpu]

A file holds one JSON object a line, ``{"turns": [...]}``; first turns are used.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from prompt_files import first_turns

from sgl_mega_plugin.embedded import Engine, Request, load_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--count", type=int, default=50, help="prompts of a file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch", type=int, default=8, help="requests together")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    engine = Engine(load_demo(args.device), max_batch=args.batch, max_context=1024)
    for pair in args.prompts:
        name, _, file = pair.partition("=")
        texts = first_turns([Path(file)])[: args.count]
        for temperature in args.temperatures:
            requests = [
                Request(text=text, max_new_tokens=args.max_tokens, temperature=temperature, seed=seed)
                for seed, text in enumerate(texts)
            ]
            lengths = [done.accept_length for done in engine.generate(requests) if done.accept_length is not None]
            print(f"{name}, temperature {temperature:g}: {fmean(lengths):.2f} over {len(lengths)} requests", flush=True)


if __name__ == "__main__":
    main()
