"""The maps of transformers, for each of its architectures: bit by bit what it loads and what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.remap import Transformers
from holdfast.remap import transformers as map_of
from holdfast.remap.nodes import Node, Saved
from tests.remap.arrangements import Tensors, evaluated
from tests.remap.tiny_models import every_name, model_of

transformers = pytest.importorskip("transformers", minversion="5.0")
safetensors = pytest.importorskip("safetensors.torch")

CAUSAL = """
    Llama Mistral Ministral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Phi Phi3 GPTNeoX GPTNeo GPTJ GPTBigCode OPT Bloom Falcon
    Olmo Olmo2 Olmo3 StableLm Starcoder2 Cohere Cohere2 Glm Glm4 Granite SmolLM3 Nemotron Exaone4 Arcee BioGpt
    Mixtral Qwen2Moe Qwen3Moe Qwen3Next DeepseekV2 DeepseekV3 Olmoe GraniteMoe GraniteMoeShared Ernie4_5_Moe Glm4Moe
    Dbrx MiniMax MiniMaxM2 Phimoe GptOss HunYuanMoEV1 FlexOlmo LongcatFlash Mamba Mamba2 FalconMamba Jamba Bamba
    RecurrentGemma Lfm2
"""
OTHERS = """
    GPT2LMHeadModel T5ForConditionalGeneration BartForConditionalGeneration MBartForConditionalGeneration
    PegasusForConditionalGeneration WhisperForConditionalGeneration SwitchTransformersForConditionalGeneration
    BertForMaskedLM RobertaForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM ModernBertForMaskedLM
    AlbertForMaskedLM XLMRobertaForMaskedLM DebertaV2ForMaskedLM EsmForMaskedLM BertModel LlamaModel MixtralModel
    LlamaForSequenceClassification ViTForImageClassification ViTModel CLIPModel CLIPVisionModel SiglipModel Dinov2Model
    DetrForObjectDetection SwinModel BeitModel ConvNextModel LlavaForConditionalGeneration
    Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Mistral3ForConditionalGeneration
    PaliGemmaForConditionalGeneration Gemma3ForConditionalGeneration InternVLForConditionalGeneration SamModel
    Idefics3ForConditionalGeneration Ernie4_5_VLMoeForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Blip2ForConditionalGeneration Wav2Vec2ForCTC HubertModel SpeechT5Model VitsModel
"""
NAMES = [f"{name}ForCausalLM" for name in CAUSAL.split()] + OTHERS.split()
FAST = ("LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration", "Ernie4_5_VLMoeForConditionalGeneration")  # fmt: skip


@pytest.fixture(autouse=True)
def _no_noise() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


def rule_of(thing: Any, **options: Any) -> Transformers:
    (rule,) = map_of(thing, **options).rules
    assert isinstance(rule, Transformers)
    return rule


def leaves(tensors: Tensors) -> dict[str, Saved]:
    """Tensors as a checkpoint has them: those of one memory are one."""
    first = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype) if tensor.numel() else name
        first.setdefault(key, Saved(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
    keys = [(t.data_ptr(), t.shape, t.dtype) if t.numel() else n for n, t in tensors.items()]
    return {name: first[key] for name, key in zip(tensors, keys)}


def made(nodes: dict[str, Node], tensors: Tensors) -> Tensors:
    return {name: evaluated(node, tensors) for name, node in nodes.items()}


def files_in(folder: Path) -> Tensors:
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in safetensors.load_file(file).items()}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def differences(there: Tensors, wanted: Tensors) -> list[str]:
    """Names that only one has, and tensors of which a bit, the shape or the dtype differs."""
    lines = [f"without {name}" for name in wanted if name not in there]
    lines += [f"more: {name}" for name in there if name not in wanted]
    for name in there.keys() & wanted.keys():
        a, b = there[name], wanted[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a.contiguous().numpy(
            force=True
        ).tobytes() != b.contiguous().numpy(force=True).tobytes():
            lines.append(f"{name}: {list(a.shape)} {a.dtype}, wanted {list(b.shape)} {b.dtype}")
    return lines


def problems(model: Any, folder: Path) -> list[str]:
    """What differs from transformers: loading what it saved, saving as it does, and saving what it loaded."""
    model.save_pretrained(folder)
    files, state, remap = files_in(folder), model.state_dict(), map_of(model)
    again = type(model).from_pretrained(folder, dtype=torch.float32)
    load = rule_of(model).resolved(leaves(files))
    lines = [f"load: {line}" for line in differences(made(load.nodes, files), again.state_dict())]
    lines += [f"load, own: {line}" for line in differences(made(load.nodes, files), state)]
    lines += [f"load: {name} is {what}" for what, names in load._asdict().items() if what != "nodes" for name in names]
    back = made(remap.inverse().resolve(leaves(state)), state)
    lines += [f"save: {line}" for line in differences(back, files)]
    again.save_pretrained(folder / "again")
    resaved = made(map_of(again).inverse().resolve(leaves(again.state_dict())), again.state_dict())
    lines += [f"save what was loaded: {line}" for line in differences(resaved, files_in(folder / "again"))]
    safetensors.save_file(
        {n: t.clone().contiguous() for n, t in back.items()}, folder / "again" / "model.safetensors", {"format": "pt"}
    )
    third = type(model).from_pretrained(folder / "again", dtype=torch.float32)
    return lines + [f"load what was mapped: {line}" for line in differences(third.state_dict(), state)]


@pytest.mark.fast_cases(*FAST)
@pytest.mark.parametrize("name", NAMES)
def test_both_ways(name: str, tmp_path: Any) -> None:
    assert not problems(model_of(name), Path(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_architecture(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """All that can be built small, and saved by transformers, without packages that the tests do not have."""
    wrong, right, unbuilt = {}, [], {}
    for name in dict.fromkeys(every_name()):
        try:
            model = model_of(name)
            model.save_pretrained(Path(tmp_path) / name)
        except Exception as error:
            unbuilt[name] = f"{type(error).__name__}: {error}"[:100]
            continue
        try:
            lines = problems(model, Path(tmp_path) / name)
        except Exception as error:
            lines = [f"{type(error).__name__}: {error}"]
        wrong |= {name: lines[:3]} if lines else {}
        right += [] if lines else [name]
    with capsys.disabled():
        print(f"\n{len(right)} architectures are equal, {len(wrong)} differ, {len(unbuilt)} were not built")
    assert not wrong
    assert len(right) > 500, unbuilt
