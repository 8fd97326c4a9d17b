"""Other projects' own checkpoint tests, run with holdfast in the place of torch's engine.

Their tests and sources stay outside of this project. You give a folder of checkouts, and the table is printed:

    make outside SRC=folder

| in the folder | from | commit |
|---|---|---|
| `torchtitan` | pytorch/torchtitan on GitHub | `b5bcd76c66d0acb1a08b176d9639425bc55e0b2a` (2026-08-21) |
| `pytorch-lightning` | Lightning-AI/pytorch-lightning | `7f0c3436cd3f6ad3753125672024fc415cbcb414` (2026-07-20) |
| `torch` | pytorch/pytorch on GitHub | see below |
| `transformers` | huggingface/transformers on GitHub | `22c22fa26f5f3352d243bc358f0947af05b1d61b` |
| `accelerate` | huggingface/accelerate on GitHub | `16cb6eb80dd9aa8b4df1a63ef57863e455d53b83` (2026-07-24) |

Each suite runs twice: as it is, and with its shim, a pytest plugin of this package that puts holdfast in torch's place.
A suite whose checkout or packages are missing is named and left out. To add one, write its shim and add a line to
`SUITES` in `tests/outside/suites.py`. What a suite imports and torch does not bring goes into `requirements.txt` here.

torchtitan's trainer also runs for real here, on two gloo ranks of the CPU, killed and resumed (`resume_titan.py`). So
do the examples for OLMo-core, Composer and verl (`recipes.py`), where these are installed; alone
they run by `python -m tests.outside.recipes`.

torch's own tests of `torch.distributed.checkpoint` run on forked ranks of the CPU (`on_cpu.py`), once with torch, once
with the functions of holdfast.dcp, and once with its `Writer` and `Reader` inside of torch's engine. The installed
torch (2.13) brings what they import. They are not all of its age, so that some do not pass with torch either. These
files are needed, below `torch/test/distributed/checkpoint`, each at its commit:

| file | commit |
|---|---|
| `e2e/test_e2e_save_and_load.py` | `9c491bc34c6ab131b18cf51db02636d65ffd3472` |
| `e2e/test_fine_tuning.py` | `6f3d4fe150128af7720a560dfa6b017c5d415432` |
| `e2e/test_pipeline.py` | `45918c74bf1d4dee32e45da1df0541475f32f5d3` |
| `fsdp/test_fsdp_dsd.py` | `a56e71aecffeafe4e5270bf19b2d755f1f49a104` |
| `test_checkpoint.py` | `f34fa1515024423a239ce26f33a8b65ea9252502` |
| `test_compatibility.py` | `066dd9c8c0726d5204a26f4e31f42f66c90451b8` |
| `test_dtensor_checkpoint.py` | `6112c47f81ef6e4d24047b79181a5001e9f2055a` |
| `test_dtensor_resharding.py` | `877d342562d56c9478800c0ee22b7d006d4d25f8` |
| `test_file_system_checkpoint.py` | `17aebe80ce31b51a2d5e4a6a21da37af4427d563` |
| `test_file_system_checkpoint_cpu.py` | `02dee1ad31d013c458c5071f1710da10a2d50392` |
| `test_format_utils.py` | `32af652941178e4d10c5b7b29cc3f02e5f5465bc` |
| `test_fsdp_model_state.py` | `02f1c1a5852be2d335281472fcaf641649841b6d` |
| `test_fsdp_optim_state.py` | `126fc44a272cec46bc5d17ce6a8de38752990ea4` |
| `test_fsdp_tp_checkpoint_conversion.py` | `9c491bc34c6ab131b18cf51db02636d65ffd3472` |
| `test_fsspec.py` | `05a963fb5b172aaae7f62c31880af2f2621809cb` |
| `test_hsdp_checkpoint.py` | `67de33e9c168ad1e804ba5abaad5284ddf698d71` |
| `test_planner.py` | `26a39059ec580351411f180816c47e2ef5134ae1` |
| `test_save_load_api.py` | `2a07214a24384fad76d6ca2f4c025e7961fa9a26` |
| `test_tp_checkpoint.py` | `108671c3a66c0808bcb2ddcfcb953a3ee9b600a2` |

Nothing here is collected by pytest.
"""
