"""Small tokenizers of the families that targets use, built on the spot."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2

_CORPUS = [
    "The quick brown fox jumps over the lazy dog while the rain in Spain stays mainly in the plain.",
    "def main():\n    print('hello, world')\n    return 0\n\nsystem user assistant",
    "Größe, façade, naïve, 中文 字符, emoji 🙂🚀, кириллица, 12345 67890",
]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with ChatML's special tokens at ids 0 to 2 and all 256 bytes. Do not change it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    # An added token that is not special, spelled outside the byte alphabet.
    tokenizer.add_tokens([AddedToken("<think> 思", special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: spaces are "▁", unknown characters are spelled in byte tokens. Do not change it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "he", "▁the", "in", "▁a", "é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "a")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """As BERT has it: continuations are "##x", words are joined by spaces. Do not change it."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghij", *(f"##{c}" for c in "abcdefghij"), ".", ",", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def write_target(folder: Path, tokenizer: Tokenizer | None = None, **generation_config: object) -> Path:
    """A target's folder as far as the gateway reads it: byte-level unless told otherwise, ChatML."""
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    files: dict[str, object] = {
        "config.json": {},
        "tokenizer_config.json": {"chat_template": CHATML, "eos_token": SPECIAL[EOS]},
        "generation_config.json": generation_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
