"""DeepSpeed: real checkpoints against their truth, its layouts on any number of ranks, and what is no whole save."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import holdfast
from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats.deepspeed import fields
from tests.formats import packed, truth
from tests.formats.deepspeed_made import Run, half, run_of, universal, write, zero3, zero12
from tests.formats.truth import same
from tests.marks import examples

SHAPES = [(5, 3), (1,), (7,), (2, 3, 4), (), (13, 1)]


def check(run: Run, path: Path) -> holdfast.Checkpoint:
    """Open it and compare everything with the run."""
    checkpoint = holdfast.open(path)
    state = checkpoint.state_dict()
    assert state["model"].keys() == run.model.keys()
    assert [n for n, t in run.model.items() if not same(state["model"][n], t)] == []
    optimizer = state["optimizer"]
    assert optimizer["state"].keys() == run.states.keys()
    for name, held in run.states.items():
        assert optimizer["state"][name].keys() == {*held, "step"}
        assert [key for key, t in held.items() if not same(optimizer["state"][name][key], t)] == []
        assert same(optimizer["state"][name]["step"], torch.tensor(run.step))
    assert [group["params"] for group in optimizer["param_groups"]] == run.groups
    if "module" in state:
        assert [n for n, t in run.masters.items() if not same(state["module"][n], t.to(run.dtype))] == []
    else:
        assert run.dtype == torch.float32 or state["optimizer_wrapper"]["zero_stage"] == 3
    return checkpoint


@pytest.mark.parametrize("name", [name for name in truth.NAMES if name.startswith("ds_")])
def test_golden(name: str) -> None:
    checkpoint = truth.check(name)
    assert checkpoint.format == "DeepSpeed"
    assert checkpoint.step == 3
    assert checkpoint.manifest.world_size == 2
    assert not checkpoint.left_out
    assert checkpoint.verify().nbytes > 0
    client = truth.Truth(name).facts["client_state"]
    assert {key: checkpoint.state_dict()[key] for key in client} == client


def test_real_zero_3_on_five_ranks(tmp_path: Path) -> None:
    ckpt = packed.unpacked("deepspeed_zero3_5r", tmp_path)
    checkpoint = holdfast.open(ckpt)
    state = checkpoint.state_dict()
    packed.check(state, ckpt)
    assert [checkpoint.per_rank("mine", rank) for rank in range(5)] == [0, 1, 2, 3, 4]
    assert checkpoint.per_rank("rng", 3).tolist() == [3, 4, 5, 6, 7, 8]  # each rank's own, in the client state
    assert state["same"].tolist() == [0, 1, 2, 3]
    assert state["model"]["blocks.0.fc1.weight"].dtype == torch.bfloat16  # frozen: it has no master


def test_real_round_robin_gradients(tmp_path: Path) -> None:
    ckpt = packed.unpacked("deepspeed_zero2_roundrobin_4r", tmp_path)
    state = holdfast.open(ckpt).state_dict()
    packed.check(state, ckpt)
    matrices, vectors = (group["params"] for group in state["optimizer"]["param_groups"])
    assert matrices[:3] == ["tok.weight", "blocks.0.fc2.weight", "blocks.1.fc1.weight"]  # as the optimizer had them
    assert vectors[0] == "mix"
    assert holdfast.open(ckpt).manifest.aliases["model/head.weight"] == "model/tok.weight"


def test_real_pipeline_of_two_stages(tmp_path: Path) -> None:
    ckpt = packed.unpacked("deepspeed_pipeline_2x2", tmp_path)
    checkpoint = holdfast.open(ckpt)
    state = checkpoint.state_dict()
    packed.check(state, ckpt)
    assert checkpoint.manifest.world_size == 4
    assert state["model"]["2.fc.bias"].dtype == torch.bfloat16  # frozen: only the layer's file has it
    assert state["model"]["tied_modules.embed.weight"].dtype == torch.float32
    assert state["optimizer"]["param_groups"][0]["params"].count("tied_modules.embed.weight") == 1


def test_real_tensor_parallel_zero_3(tmp_path: Path) -> None:
    ckpt = packed.unpacked("deepspeed_zero3_tp_2x2", tmp_path)
    state = holdfast.open(ckpt).state_dict()
    packed.check(state, ckpt)
    assert state["model"]["row.weight"].shape == (12, 16)  # cut along its second axis
    assert state["model"]["tok.weight"].shape == (29, 12)  # without the padding of the vocabulary


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=examples(40))
@given(shapes=shapes, world=st.integers(1, 9), groups=st.integers(1, 3), stage=st.integers(1, 3), data=st.data())
def test_any_shapes_on_any_number_of_ranks(shapes: list[Any], world: int, groups: int, stage: int, data: Any) -> None:
    run = run_of(shapes, min(groups, len(shapes)))
    kind = data.draw(st.sampled_from(["new", "old", "bf16", "dealt"]))
    run.dtype = torch.bfloat16 if kind == "bf16" else data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    run.buffers = {"scale": torch.rand(3, dtype=run.dtype), "seen": torch.tensor(5)}
    if data.draw(st.booleans()):
        run.frozen = {"frozen.weight": torch.rand(data.draw(shapes_of_one), dtype=run.dtype)}
    if stage == 3:
        files = zero3(run, world, sub_group=data.draw(st.sampled_from([1, 20, 10**9])))
    else:
        files = zero12(
            run, world, stage=stage, old=kind == "old", wrapper=kind != "bf16", round_robin=kind == "dealt"
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        assert check(run, write(Path(folder), files)).manifest.world_size == world


shapes_of_one = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("step_in", ["folder", "groups"])
def test_universal(tmp_path: Path, flat: bool, step_in: str) -> None:
    run = run_of(SHAPES, 2)
    run.buffers = {"scale": torch.rand(3)}
    run.frozen = {"frozen.weight": torch.rand(2, 2).bfloat16()}
    run.tied = {"head.weight": "layer0.weight"}
    write(tmp_path, universal(run, flat=flat, step_in=step_in), "global_step3_universal", "latest_universal")
    checkpoint = check(run, tmp_path)
    assert checkpoint.reading == "latest_universal names global_step3_universal"
    check(run, tmp_path / "global_step3_universal")


def test_universal_with_padding_at_the_end(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    files = universal(run, flat=True)
    files["zero/layer1.weight/fp32.pt"] = torch.cat([run.masters["layer1.weight"], torch.rand(3)])
    check(run, write(tmp_path, files))
    torch.save(torch.rand(5), tmp_path / "global_step3" / "zero" / "layer2.weight" / "exp_avg.pt")
    with pytest.raises(Damaged, match=r"exp_avg\.pt holds 5 elements of a parameter of shape \(7,\)"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize("lost", ["zero/layer2.weight", "zero/layer2.weight/fp32.pt"])
def test_universal_lacks_a_parameter(tmp_path: Path, lost: str) -> None:
    files = universal(run_of(SHAPES), flat=False)
    kept = {name: content for name, content in files.items() if not name.startswith(lost)}
    write(tmp_path, kept)
    with pytest.raises(Damaged, match=r"layer2\.weight"):
        holdfast.open(tmp_path)


def test_elastic_and_other_optimizers(tmp_path: Path) -> None:
    run = run_of(SHAPES, 2)
    files = zero12(run, 3, elastic=True)
    state = holdfast.open(write(tmp_path / "elastic", files)).state_dict()["optimizer"]
    assert same(state["state"]["layer3.weight"]["exp_avg"], run.states["layer3.weight"]["exp_avg"])
    assert state["param_groups"] == [{"params": names} for names in run.groups]  # it keeps no hyperparameters
    check(run, write(tmp_path / "fused", zero12(run, 3, step_in="groups")))
    sgd = run_of(SHAPES, keys=["momentum_buffer"])
    state = holdfast.open(write(tmp_path / "sgd", zero12(sgd, 3, step_in="nowhere"))).state_dict()["optimizer"]["state"]
    assert state["layer0.weight"].keys() == {"momentum_buffer"}


def test_state_that_is_not_cut_at_parameters(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    files = zero12(run, 2)
    for rank, content in enumerate(v for k, v in files.items() if "optim" in k):
        held = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        held |= {"worker_error": torch.full((4,), float(rank)), "scale": torch.tensor([2.5]), "coef": 0.5}
    checkpoint = holdfast.open(write(tmp_path, files))
    state = checkpoint.state_dict()
    assert checkpoint.per_rank("optimizer_wrapper/unnamed_state/0/worker_error", 1).tolist() == [1.0] * 4
    assert all(leaf["coef"] == 0.5 and leaf["scale"].tolist() == [2.5] for leaf in state["optimizer"]["state"].values())
    steps = [leaf["step"] for leaf in state["optimizer"]["state"].values()]
    assert len({t.data_ptr() for t in steps}) == len(steps)  # a fused optimizer counts each up


def test_bf16_optimizer_without_zero_tells_its_parameters(tmp_path: Path) -> None:
    run = run_of(SHAPES, 2)
    run.dtype = torch.bfloat16
    files = zero12(run, 3, wrapper=False)
    files["mp_rank_00_model_states.pt"] |= {"param_shapes": None, "shared_params": None, "optimizer": {"of": "rank 0"}}
    bounds = {}
    for group in run.groups:  # as the ranks list them: what each has a part of, in its order
        size = len(files["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
                   ["single_partition_of_fp32_groups"][run.groups.index(group)])  # fmt: skip
        at = 0
        for name in group:
            end = at + run.masters[name].numel()
            bounds[name] = {rank for rank in range(3) if at < (rank + 1) * size and rank * size < end}
            at = end
    for rank in range(3):
        held = files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]
        held["param_slice_mappings"] = [{n: {} for n in group if rank in bounds[n]} for group in run.groups]
    check(run, write(tmp_path, files))


def test_without_zero(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.rand(1, 3)).sum().backward()
    optimizer.step()
    saved = {
        "module": linear.state_dict(), "buffer_names": [], "optimizer": optimizer.state_dict(), "param_shapes": None,
        "global_steps": 1, "dp_world_size": 4, "ds_version": "0.19.8",
    }  # fmt: skip
    checkpoint = holdfast.open(write(tmp_path / "fp32", {"mp_rank_00_model_states.pt": saved}))
    other = torch.nn.Linear(3, 2)
    loaded = torch.optim.AdamW(other.parameters(), lr=9.0)
    holdfast.load(checkpoint.path, {"model": other, "optimizer": loaded})
    assert same(other.weight.data, linear.weight.data)
    assert same(loaded.state[other.bias]["exp_avg"], optimizer.state[linear.bias]["exp_avg"])
    assert loaded.param_groups[0]["lr"] == 1e-3
    assert checkpoint.manifest.world_size == 4


@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_without_zero(tmp_path: Path, fused: bool) -> None:
    """Its fp32 weights have no names: they stay beside the optimizer, under the numbers that DeepSpeed gave them."""
    run = run_of(SHAPES)
    run.dtype = torch.bfloat16
    run.groups = [list(run.masters)]
    state = holdfast.open(write(tmp_path, half(run, fused=fused))).state_dict()
    assert same(state["model"]["layer0.weight"], run.masters["layer0.weight"].bfloat16())
    kept = state["optimizer_wrapper"]["fp32_groups_flat"] if fused else state["optimizer_wrapper"]["fp32_groups"][0]
    assert sum(t.numel() for t in kept) == sum(t.numel() for t in run.masters.values())
    assert state["optimizer"]["param_groups"][0]["params"] == list(range(len(kept)))


def test_client_state_of_any_name(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    run.client = [{"epoch": 2, "rng": torch.arange(4)}]
    state = check(run, write(tmp_path / "plain", zero12(run, 2))).state_dict()
    assert state["epoch"] == 2 and state["rng"].tolist() == [0, 1, 2, 3] and state["lr_scheduler"] == {"last_epoch": 3}
    run.client = [{"model": "gpt"}]
    state = check(run, write(tmp_path / "clash", zero12(run, 2))).state_dict()
    assert state["client_state"]["model"] == "gpt" and state["client_state"]["lr_scheduler"] == {"last_epoch": 3}


def test_buffers_that_differ_by_rank(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    run.buffers = {"mean": torch.zeros(3), "seen": torch.tensor(4)}
    files = zero3(run, 2)
    files["zero_pp_rank_1_mp_rank_00_model_states.pt"]["module"]["mean"] = torch.ones(3)
    checkpoint = check(run, write(tmp_path, files))  # the first rank's
    assert checkpoint.per_rank("buffers_by_rank/mean", 1).tolist() == [1.0, 1.0, 1.0]


def test_beside_hugging_face_s_trainer(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    write(tmp_path, zero12(run, 2))
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3, "epoch": 1.5}')
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    (tmp_path / "zero_to_fp32.py").write_text("pass")
    save_file({"layer0.weight": torch.zeros(5, 3)}, tmp_path / "model.safetensors")
    for rank in range(2):
        torch.save({"cpu": torch.arange(3) + rank}, tmp_path / f"rng_state_{rank}.pth")
    checkpoint = check(run, tmp_path)
    assert checkpoint.per_rank("rng_state", 1)["cpu"].tolist() == [1, 2, 3]
    assert checkpoint.state_dict()["trainer_state"]["epoch"] == 1.5
    assert list(checkpoint.attachments) == ["config.json"]
    assert "model.safetensors beside it not read" in checkpoint.reading


# What is not a whole save


def optims(files: dict[str, Any]) -> list[dict[str, Any]]:
    return [content["optimizer_state_dict"] for name, content in files.items() if "optim" in name]


def refused(tmp_path: Path, files: dict[str, Any], kind: Any, text: str | None = None) -> None:
    write(tmp_path, files)
    with pytest.raises(kind, match=text) as caught:
        holdfast.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_file(tmp_path: Path, stage: int, kind: str, rank: int) -> None:
    files = zero3(run_of(SHAPES), 3) if stage == 3 else zero12(run_of(SHAPES), 3)
    name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
    if stage == 2 and kind == "model":
        name = "mp_rank_00_model_states.pt"
    del files[name]
    with pytest.raises((Damaged, NotACheckpoint), match="missing|saved as one of 3|saves 3 model files|no \\*_model"):
        holdfast.open(write(tmp_path, files))


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_an_earlier_save_on_more_ranks(tmp_path: Path, stage: int) -> None:
    run = run_of(SHAPES)
    make = zero3 if stage == 3 else zero12
    files = {**make(run, 4), **make(run, 2)}
    refused(
        tmp_path, files, Damaged, "files of 4 ranks, but rank 0 saved as one of 2: those of an earlier save on more"
    )


def test_no_optimizer_files(tmp_path: Path) -> None:
    files = {k: v for k, v in zero12(run_of(SHAPES), 2).items() if "model" in k}
    refused(tmp_path, files, Damaged, "none of its optimizer files")


def test_two_namings(tmp_path: Path) -> None:
    files = zero12(run_of(SHAPES), 2)
    files["bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"] = files["zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    refused(tmp_path, files, Damaged, "two saves that named them differently")


def test_files_of_two_saves(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    files = zero12(run, 2)
    run.step = 4.0
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    refused(tmp_path / "steps", {**files, name: zero12(run, 2)[name]}, Damaged, "optimizers are at different steps")
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    three = zero3(run_of(SHAPES), 2)
    refused(tmp_path / "models", {**three, name: zero3(run, 2)[name]}, Damaged, r"of steps \['3', '4'\]")
    optims(files)[1]["zero_stage"] = 1
    refused(tmp_path / "stages", files, Damaged, "stages")


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_another_size(tmp_path: Path, stage: int) -> None:
    files = zero3(run_of(SHAPES), 2) if stage == 3 else zero12(run_of(SHAPES), 2)
    held = optims(files)[1]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    held[key][0] = held[key][0][:-9]
    refused(tmp_path, files, Damaged, "elements")


def test_a_rank_without_state(tmp_path: Path) -> None:
    files = zero12(run_of(SHAPES), 2)
    optims(files)[1]["base_optimizer_state"]["state"] = {}
    refused(tmp_path, files, Damaged, r"optimizer of rank 1 keeps \[\]")


def test_experts(tmp_path: Path) -> None:
    files = zero12(run_of(SHAPES), 2) | {"layer_0_expert_1_mp_rank_00_model_states.pt": {}}
    refused(tmp_path, files, Unsupported, "mixture of experts")


def test_swapped_to_nvme(tmp_path: Path) -> None:
    files = zero3(run_of(SHAPES), 2)
    for held in optims(files):
        held["fp32_flat_groups"] = [torch.empty(0)]
    refused(tmp_path, files, Unsupported, "NVMe")


def test_tensor_parallel_and_nothing_tells_how(tmp_path: Path) -> None:
    files = zero12(run_of(SHAPES), 2)
    files |= {name.replace("mp_rank_00", "mp_rank_01"): content for name, content in files.items()}
    for content in files.values():
        content["mp_world_size"] = 2
    refused(tmp_path, files, Unsupported, "no file says along which axes")
    lost = {name: content for name, content in files.items() if "zero" not in name or "mp_rank_00" in name}
    refused(tmp_path / "lost", lost, Damaged, "mp_rank_01 only the model or only the optimizer files")
    del files["mp_rank_01_model_states.pt"]
    files = {name: content for name, content in files.items() if "mp_rank_00" in name}
    refused(tmp_path / "one", files | {"layer_00-model_states.pt": {}}, Damaged, "files of 1 model-parallel ranks")


@pytest.mark.parametrize("pattern", ["(a+)+b", "(x*){9}", "[", 5, "a" * 600])
def test_patterns_that_cost_or_are_none(tmp_path: Path, pattern: Any) -> None:
    files = zero12(run_of(SHAPES), 1)
    files["mp_rank_00_model_states.pt"]["universal_checkpoint_info"] = {"tp_replicated_parameter_patterns": [pattern]}
    files |= {name.replace("mp_rank_00", "mp_rank_01"): content for name, content in files.items()}
    for content in files.values():
        content["mp_world_size"] = 2
    refused(tmp_path, files, (Damaged, Unsupported), "pattern")


@pytest.mark.parametrize(
    ("key", "value"),
    [("param_shapes", [{"w": (-1, -5)}]), ("param_shapes", 7), ("param_shapes", [{3: (5,)}]), ("buffer_names", 5),
     ("shared_params", [1]), ("module", 3), ("param_shapes", [{"w": (10**30,)}])],
)  # fmt: skip
def test_nonsense_in_the_model_s_file(tmp_path: Path, key: str, value: Any) -> None:
    files = zero12(run_of(SHAPES), 2)
    files["mp_rank_00_model_states.pt"][key] = value
    refused(tmp_path, files, Damaged)


@pytest.mark.parametrize(
    ("key", "value"),
    [("base_optimizer_state", 5), ("base_optimizer_state", {}), ("group_paddings", [-7]), ("group_paddings", ["x"]),
     ("param_alignment_paddings", [[-1, 1, 0, 0, 0, 0]]), ("single_partition_of_fp32_groups", {}),
     ("single_partition_of_fp32_groups", [torch.zeros(2, 2)]), ("partition_count", "two"), ("zero_stage", "two")],
)  # fmt: skip
def test_nonsense_in_an_optimizer_s_file(tmp_path: Path, key: str, value: Any) -> None:
    files = zero12(run_of(SHAPES), 2)
    optims(files)[0][key] = value
    refused(tmp_path, files, Damaged)


@pytest.mark.parametrize("key", fields._MODEL)
def test_a_field_of_the_model_s_file_of_another_type(tmp_path: Path, key: str) -> None:
    files = zero12(run_of(SHAPES), 2)
    files["mp_rank_00_model_states.pt"][key] = "two"
    refused(tmp_path, files, Damaged, f"mp_rank_00_model_states.pt: {key} is not as DeepSpeed writes it")


@pytest.mark.parametrize("key", fields._OPTIMIZER)
def test_a_field_of_an_optimizer_s_file_of_another_type(tmp_path: Path, key: str) -> None:
    files = zero12(run_of(SHAPES), 2)
    optims(files)[1][key] = "two"
    refused(tmp_path, files, Damaged, f"zero_pp_rank_1_mp_rank_00_optim_states.pt: {key} is not as DeepSpeed writes it")


def test_a_rank_without_the_states_of_a_group(tmp_path: Path) -> None:
    files = zero12(run_of(SHAPES), 2)
    optims(files)[1]["base_optimizer_state"]["param_groups"] = []
    refused(tmp_path, files, Damaged, "not every rank has states and paddings of all 1 groups")


def test_the_states_of_zero_3_as_a_list(tmp_path: Path) -> None:
    files = zero3(run_of(SHAPES), 2)
    optims(files)[1]["optimizer_state_dict"] = []
    refused(tmp_path, files, Damaged, "ZeRO 3 never writes")


def test_a_file_cut_off(tmp_path: Path) -> None:
    write(tmp_path, zero12(run_of(SHAPES), 2))
    path = tmp_path / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Damaged, match="zero_pp_rank_1"):
        holdfast.open(tmp_path)


# Which tag


def test_the_tag_s_own_folder(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    write(tmp_path, zero12(run, 2), "mine")
    assert check(run, tmp_path / "mine").reading == ""


def test_latest_before_universal(tmp_path: Path) -> None:
    run, other = run_of(SHAPES), run_of(SHAPES, seed=1)
    write(tmp_path, zero12(run, 2))
    write(tmp_path, universal(other, flat=False), "global_step2_universal", "latest_universal")
    reading = "latest names global_step3, latest_universal names global_step2_universal, which was not taken"
    assert check(run, tmp_path).reading == reading


def test_no_latest(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    write(tmp_path, zero12(run, 2), latest="")
    assert check(run, tmp_path).reading == "global_step3, the only tag; there is no file `latest`"
    write(tmp_path, zero12(run, 2), "global_step6", latest="")
    with pytest.raises(NotACheckpoint, match="the tags global_step3, global_step6 are there"):
        holdfast.open(tmp_path)


def test_latest_names_what_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, zero12(run_of(SHAPES), 2))
    (tmp_path / "latest").write_text("global_step9\n")
    with pytest.raises(NotACheckpoint, match="latest names global_step9, and the tags global_step3 are there"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize("tag", ["../run/global_step3", "..", "/global_step3"])
def test_latest_leads_out(tmp_path: Path, tag: str) -> None:
    run = tmp_path / "run" if tag != "../run/global_step3" else tmp_path / "other"
    write(tmp_path / "run", zero12(run_of(SHAPES), 2))
    run.mkdir(exist_ok=True)
    (run / "zero_to_fp32.py").write_text("")
    (run / "latest").write_text(tag if not tag.startswith("/") else str(tmp_path / "elsewhere" / "global_step3"))
    with pytest.raises((Damaged, NotACheckpoint), match="nothing outside is read|tag"):
        holdfast.open(run)


def test_a_link_that_leads_out(tmp_path: Path) -> None:
    write(tmp_path / "away", zero12(run_of(SHAPES), 2))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("global_step3")
    (tmp_path / "run" / "global_step3").symlink_to(tmp_path / "away" / "global_step3")
    with pytest.raises(Damaged, match="nothing outside is read"):
        holdfast.open(tmp_path / "run")


def test_folders_of_others(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("the best of all")
    with pytest.raises(NotACheckpoint, match=r"manifest\.json"):
        holdfast.open(tmp_path)
