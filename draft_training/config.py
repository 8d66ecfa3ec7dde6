"""The YAML file of a training run. Paths are relative to the file; errors name the key."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem.config import Device, Dtype, InputFile, ModelFolder, OutputFolder, read_config


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptKind(_Section):
    """One kind of prompt that the target writes itself."""

    share: float = Field(gt=0)
    """Relative to the other kinds'."""
    openings: list[str] = Field(default=[""], min_length=1)
    """First words of the user's turn, one picked at random; the target goes on from there."""


class DataConfig(_Section):
    """The `data:` section: conversations whose answers the target writes."""

    target: ModelFolder | None = None
    """Another folder of the same target to write with, such as the one with 4-bit weights; unset: `target` itself."""
    answer_tokens: int = Field(ge=1)
    """Written by the target in all, of all shards in the run's folder; what goes beyond `seed_shards` comes from
    `prompts`, or else from `kinds`."""
    kinds: dict[str, PromptKind] = {}
    """Prompts the target writes itself, by kind."""
    prompts: list[InputFile] = []
    """Files of prompts to answer instead, JSON lines: {"messages": [...]} or {"prompt": "..."}, optionally "kind"."""
    seed_shards: list[InputFile] = []
    """Shards written earlier, copied into the run's folder."""
    held_out_prompts: InputFile
    """A file of prompts, same form, that are never trained on: acceptance is measured on the target's answers to them,
    at temperature 0."""
    held_out_tokens: int = Field(default=128, ge=8)
    """Tokens of those answers at most."""
    system_prompts: list[str] = []
    """Put before a share of the prompts that the target writes."""
    system_share: float = Field(default=0.2, ge=0, le=1)
    greedy_share: float = Field(default=0.6, ge=0, le=1)
    """Answered at temperature 0; the others at `temperature`."""
    temperature: float = Field(default=0.8, gt=0)
    top_k: int = Field(default=50, ge=1)
    """Of sampled answers and of user turns (which are sampled at temperature 1)."""
    max_prompt_tokens: int = Field(default=160, ge=8)
    max_answer_tokens: int = Field(default=256, ge=8)
    min_answer_tokens: int = Field(default=8, ge=2)
    """Shorter answers teach nothing and are dropped."""
    slots: int = Field(default=64, ge=1)
    """Conversations written at once, per writer."""
    writers: int = Field(default=1, ge=1)
    """Processes that write."""
    shard_conversations: int = Field(default=128, ge=1)
    """Conversations per shard: what a cut-off run loses at most, per writer."""
    seed: int = 0

    @model_validator(mode="after")
    def _has_a_source(self) -> "DataConfig":
        if not (self.kinds or self.prompts or self.seed_shards):
            raise ValueError("needs one of kinds, prompts, seed_shards")
        return self


class Dflash2Section(_Section):
    """The `draft.dflash2:` section; keys as in published configurations."""

    conv_kernel_size: int = Field(default=2, ge=1)
    conv_group_size: int = Field(default=16, ge=1)
    selector_rank: int = Field(default=256, ge=1)
    selector_top_k: int = Field(default=16, ge=1)


class DraftSection(_Section):
    """The `draft:` section: the network. Sizes that are not set are the target's."""

    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Layers of the target whose outputs feed the draft model, 0-based."""
    block_size: int = Field(default=8, ge=2)
    """Tokens of a block, the anchor included."""
    num_hidden_layers: int = Field(default=3, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    mask_token_id: int = Field(ge=0)
    """A token of the target's vocabulary that no text uses."""
    dflash2: Dflash2Section | None = None
    """Train a DFlash2 draft model; unset: DFlash (v1)."""
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Draft only this many of the most frequent tokens: a smaller head to multiply with. Unset: all."""


class TrainingSection(_Section):
    """The `training:` section."""

    steps: int = Field(default=4000, ge=1)
    """Optimizer steps in all; the learning rate falls to nothing over them, in a cosine."""
    batch_conversations: int = Field(default=8, ge=1)
    """Conversations per forward."""
    accumulation: int = Field(default=4, ge=1)
    """Forwards per optimizer step."""
    blocks: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Slots of the blocks of a step's forwards in turn, the anchor's included; at most draft.block_size, which empty
    stands for. Short ones cost less, and the first slots are those that count."""
    anchors: int = Field(default=24, ge=1)
    """Random anchors per conversation and epoch."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of layers and `fc`; AdamW for the rest. Learning rates are of AdamW's size."""
    learning_rate: float = Field(default=6e-4, gt=0)
    warmup_share: float = Field(default=0.04, ge=0, le=1)
    """Of the steps: the learning rate rises to its peak."""
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    loss_decay: float | None = Field(default=None, gt=0)
    """gamma of the position weights exp(-(k - 1) / gamma); unset: 4, 5 or 7 for blocks of up to 8, 10 and more."""
    distribution_share: float = Field(default=0.5, ge=0, le=1)
    """How much the target's distribution counts against the token that came."""
    selector_weight: float = Field(default=1.0, ge=0)
    """Of DFlash2's candidate selector in the loss."""
    average: float = Field(default=0.998, ge=0, lt=1)
    """Decay per step of the moving average of the weights, which is what is measured and exported."""
    autocast: bool | None = None
    """Multiply in bfloat16. Unset: where the device is a GPU."""
    initial_model: ModelFolder | None = None
    """Begin with this DFlash folder's weights; unset: with the target's own last layers."""
    checkpoint_minutes: float = Field(default=5.0, gt=0)
    evaluate_minutes: float = Field(default=10.0, gt=0)
    """How often the acceptance length on held-out conversations is measured."""
    seed: int = 0


class TrainConfig(_Section):
    """A whole file."""

    target: ModelFolder
    """The target: a Hugging Face folder with a chat template."""
    run: OutputFolder
    """The run's own folder: data, hidden states, checkpoints. A run is taken up where it was left."""
    output: OutputFolder
    """Where the draft model is written, in the published DFlash format."""
    device: Device = "auto"
    dtype: Dtype = "float32"
    """Of the target. The CPU's native path needs bfloat16; in torch, on CPUs without matrix units, float32 is the
    fastest from about 32 rows on (measured)."""
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"
    """What runs the target on a CPU, as in the verifier's section: native is C++ that is compiled here, auto does it
    where that is possible, torch never."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads, of all writers together; unset takes all cores."""
    data: DataConfig
    draft: DraftSection
    training: TrainingSection = TrainingSection()

    @classmethod
    def load(cls, path: Path) -> "TrainConfig":
        """StartupError with one line per wrong key."""
        return read_config(path, cls)
