"""GGUF to Hugging Face: same weights, same logits, same token ids; refusals name what is wrong and leave nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tandem.checkpoints.gguf_convert import convert, is_prepared
from tandem.errors import StartupError
from tests.fakes.bpe_oracle import BpeOracle, byte_alphabet

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 2, 4, 2, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "Ġw o", "Ã ©"]
TOKENS = [*SPECIAL, *byte_alphabet().values(), *(merge.replace(" ", "") for merge in MERGES)]
TOKENS += [f"<filler {n}>" for n in range(-len(TOKENS) % 32)]

ODD_TEXTS = [
    "hello world",
    "  two leading, trailing  ",
    "tabs\tand\r\nline\n\n\nends   \n",
    "digits 1234567890 12.5e-3 007",
    "other digits ٣٤٥ ½ Ⅷ ³ ①",
    "don't I'LL we've they're",
    "café é naïve ß ſ İ",
    "漢字かな交じり文、と句読点。",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 emoji",
    "def f(x: int) -> str:\n    return f'{x!r}' # comment\n",
    "nul \x00, bell \x07, escape \x1b[0m, delete \x7f",
    "\u200b\u00a0\u2003\ufeff",
    "a" * 300,
    "",
]


def write_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    skip: tuple[str, ...] = (),
    architecture: str = "llama",
    pre: str = "smollm",
) -> None:
    """A GGUF as llama.cpp's converter writes it: q and k rows interleaved per head, matrices quantised."""
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Callable[[], None]] = {
        "context_length": lambda: writer.add_context_length(CONTEXT),
        "embedding_length": lambda: writer.add_embedding_length(HIDDEN),
        "block_count": lambda: writer.add_block_count(LAYERS),
        "feed_forward_length": lambda: writer.add_feed_forward_length(INNER),
        "head_count": lambda: writer.add_head_count(HEADS),
        "head_count_kv": lambda: writer.add_head_count_kv(KV_HEADS),
        "eps": lambda: writer.add_layer_norm_rms_eps(1e-5),
        "rope": lambda: writer.add_rope_freq_base(10000.0),
        "vocab": lambda: writer.add_vocab_size(len(TOKENS)),
        "model": lambda: writer.add_tokenizer_model("gpt2"),
        "pre": lambda: writer.add_tokenizer_pre(pre),
        "tokens": lambda: writer.add_token_list(TOKENS),
        "types": lambda: writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS]),
        "merges": lambda: writer.add_token_merges(MERGES),
        "bos": lambda: writer.add_bos_token_id(1),
        "eos": lambda: writer.add_eos_token_id(2),
        "template": lambda: writer.add_chat_template("{{ messages[0]['content'] }}"),
    }
    for key, add in fields.items():
        if key not in skip:
            add()
    change(writer)
    for name, weight in weights.items():
        if name in skip:
            continue
        array = weight.numpy()
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
            continue
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for hf, short in parts.items():
        name = name.replace(hf, short)
    return name


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def weights_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: w for name, w in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def run_convert(source: Path, output: Path, sampling: dict[str, Any] | None = None, keep_blocks: bool = False) -> None:
    convert(source, output, sampling, {"README.md": "about"}, lambda what, done, total: None, keep_blocks)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder of the tied model."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "tiny.gguf", weights_of(tiny_llama(tied=True)))
    run_convert(folder / "tiny.gguf", folder / "out", {"temperature": 0.2})
    return folder / "out"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, tied: bool, quantisation: str) -> None:
    model = tiny_llama(tied)
    kind = gguf.GGMLQuantizationType[quantisation]
    write_gguf(tmp_path / "tiny.gguf", weights_of(model), kind)
    run_convert(tmp_path / "tiny.gguf", tmp_path / "out")

    rounded = {
        name: (
            w
            if w.ndim == 1
            else torch.from_numpy(np.array(gguf.quants.dequantize(gguf.quants.quantize(w.numpy(), kind), kind)))
        )
        .to(torch.bfloat16)
        .float()
        for name, w in weights_of(model).items()
    }
    model.load_state_dict(rounded, strict=False)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert ours.config.tie_word_embeddings is tied
    ids = torch.arange(24).unsqueeze(0)
    with torch.no_grad():
        expected, got = model(ids).logits, ours(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_config_holds_the_metadata(plain: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    expected = {
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()
    generation = json.loads((plain / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.2}
    assert (plain / "README.md").read_text() == "about"


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_token_ids_are_those_of_byte_pair_encoding_by_definition(tmp_path: Path, pre: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", weights_of(tiny_llama(tied=True)), pre=pre)
    run_convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    oracle = BpeOracle(TOKENS, MERGES, split_digits=pre == "smollm")
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    twelve = TOKENS.index("12")
    assert (twelve in tokenizer.encode("12").ids) == (pre == "gpt-2")


def test_control_tokens_are_special_and_only_spelled_when_allowed(plain: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(plain)
    assert tokenizer.encode("<|im_start|>hello<|im_end|>", add_special_tokens=False) == [1, TOKENS.index("hello"), 2]
    assert tokenizer.decode([1, TOKENS.index("hello"), 2], skip_special_tokens=True) == "hello"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    raw = Tokenizer.from_file(str(plain / "tokenizer.json"))
    raw.encode_special_tokens = True
    assert not set(raw.encode("<|im_start|>hello<|im_end|>").ids) & {0, 1, 2}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "gemma"}, "general.architecture 'gemma' is not supported"),
    "key": ({"skip": ("block_count",)}, "llama.block_count is missing"),
    "tensor": ({"skip": ("model.norm.weight",)}, "tensor model.norm.weight is missing"),
    "pre-tokenizer": ({"pre": "llama-bpe"}, "tokenizer.ggml.pre 'llama-bpe' is not supported"),
    "merges": ({"skip": ("merges",)}, "tokenizer.ggml.merges is missing"),
    "rope scaling": (
        {"change": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)},
        "llama.rope.scaling.type 'linear' is not supported",
    ),
    "extra tensor": (
        {"change": lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))},
        "tensor rope_freqs.weight is not supported",
    ),
    "bos": ({"change": lambda writer: writer.add_add_bos_token(True)}, "tokenizer.ggml.add_bos_token true"),
    "shape": (
        {"skip": ("embedding_length",), "change": lambda writer: writer.add_embedding_length(2 * HIDDEN)},
        "tensor token_embd.weight has shape",
    ),
    "vocabulary": (
        {"skip": ("vocab",), "change": lambda writer: writer.add_vocab_size(999)},
        "llama.vocab_size is 999",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    arguments, reason = BAD[case]
    write_gguf(tmp_path / "bad.gguf", weights_of(tiny_llama(tied=True)), **arguments)
    with pytest.raises(StartupError) as caught:
        run_convert(tmp_path / "bad.gguf", tmp_path / "out")
    assert reason in str(caught.value)
    assert "bad.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, weights_of(tiny_llama(tied=True)))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(StartupError, match=r"cut\.gguf: not a complete GGUF file"):
        run_convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_things_is_never_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", weights_of(tiny_llama(tied=True)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(StartupError, match="is not a prepared model"):
        run_convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", weights_of(tiny_llama(tied=True)))
    (tmp_path / "out").mkdir()
    run_convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert is_prepared(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


TARGET = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def real() -> tuple[Tokenizer, BpeOracle]:
    data = json.loads((TARGET / "tokenizer.json").read_text())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in data["merges"]]
    return Tokenizer.from_file(str(TARGET / "tokenizer.json")), BpeOracle(tokens, merges, split_digits=True)


@pytest.mark.model
def test_the_demo_target_encodes_as_byte_pair_encoding_by_definition(real: tuple[Tokenizer, BpeOracle]) -> None:
    tokenizer, oracle = real
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs", "Cn", "Co", "Cc")), max_size=60))
def test_the_demo_target_encodes_any_assigned_text_and_decodes_it_back(
    real: tuple[Tokenizer, BpeOracle], text: str
) -> None:
    tokenizer, oracle = real
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_the_demo_target_knows_a_fact_in_transformers() -> None:
    """Weights in the wrong order or places make noise, not knowledge."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
