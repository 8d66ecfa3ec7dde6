"""Give a draft model a reduced head: it then proposes only the tokens that are most frequent in a corpus.

    python -m tools.reduce_draft_head models/smollm2-135m-dflash answers.jsonl.gz --tokens 8192

The corpus is a shard of training data (draft_training.conversations): what the target itself wrote counts. The choice
is stored as published draft models with a reduced vocabulary store it: `draft_vocab_size` in config.json and a tensor
`d2t`, row i proposing token i + d2t[i]. What is emitted does not change, since the verifier decides; how much is
accepted does.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draft_training.conversations import frequent_tokens, read_shard


def reduce_head(folder: Path, tokens: list[int]) -> None:
    """Write `d2t` and `draft_vocab_size` into a DFlash folder."""
    config = json.loads((folder / "config.json").read_text())
    config["draft_vocab_size"] = len(tokens)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # save_file makes a file that only its owner can read.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    reduce_head(options.folder, frequent_tokens(read_shard(options.corpus), options.tokens))


if __name__ == "__main__":
    main()
