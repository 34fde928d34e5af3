"""The reason for which PyTorch has no CUDA, and models that a run warns of."""

from flexmarl.launch.config.config_reading import resolve
from flexmarl.launch.config.config_warnings import warnings_about
from flexmarl.launch.run.preflight.model_checks import model_findings, no_cuda_reason


def test_a_build_without_cuda_and_an_old_driver_are_named() -> None:
    assert "2.13.0+cpu is built without CUDA" in no_cuda_reason("2.13.0+cpu", None, "580.1")
    said = no_cuda_reason("2.13.0", "13.0", "570.86.10")
    assert "needs the driver 580 or later, and 570.86.10 is installed" in said
    assert no_cuda_reason("2.13.0", "13.0", "580.159.04") == no_cuda_reason("2.13.0", "13.0", "") == ""


def test_float32_on_a_gpu_is_warned_about() -> None:
    on_gpu = "agents.sorter.model.device=cuda"
    assert warnings_about(resolve("sort-digits", [on_gpu])) == [], "the default there is bfloat16"
    said = warnings_about(resolve("sort-digits", [on_gpu, "agent_defaults.model.dtype=float32"]))
    assert [text.partition(":")[0] for text in said if "float32" in text] == ["policy sorter"]


def test_each_trained_mixture_of_experts_is_warned_about() -> None:
    experts = "agent_defaults.model.config={model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2}"
    frozen = "agents.checker.train=false"
    for settings, policies in (([experts], ["sorter", "checker"]), ([experts, frozen], ["sorter"]), ([], [])):
        warnings = model_findings(resolve("sort-digits", settings)).warnings
        assert [text.partition(":")[0] for text in warnings] == [f"policy {name}" for name in policies]
        assert all(
            "model.router_replay=true" in text
            and "algorithm.correction=icepop" in text
            and "ratio_deviation" in text
            and "weights.probe_bound" not in text
            for text in warnings
        )
    (said,) = model_findings(
        resolve("sort-digits", [experts, frozen, "agents.sorter.engine.name=vllm"])
    ).warnings
    assert "weights.probe_bound may have to be larger" in said and "the engine vllm" in said


def test_a_replay_of_routers_is_refused_without_experts_and_warns_of_nothing_with_them() -> None:
    replay = "agents.sorter.model.router_replay=true"
    (problem,) = model_findings(resolve("sort-digits", [replay])).problems
    assert (problem.policy, problem.part) == ("sorter", "router_replay")
    assert "no experts whose choice" in problem.text
    experts = "agents.sorter.model.config={model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2}"
    findings = model_findings(resolve("sort-digits", [experts, replay]))
    assert not findings.problems and not findings.warnings


def test_routers_that_can_not_be_replayed_are_refused_by_the_config_of_their_model() -> None:
    model = "agents.sorter.model.config={model_type: phimoe, num_local_experts: 4, num_experts_per_tok: 2}"
    findings = model_findings(resolve("sort-digits", [model, "agents.sorter.model.router_replay=true"]))
    (problem,) = findings.problems
    assert (problem.policy, problem.part, problem.value) == ("sorter", "router_replay", "true")
    for part in (
        "PhimoeForCausalLM",
        "model.layers.0",
        "leave router_replay out",
        "algorithm.correction=icepop",
    ):
        assert part in problem.text
    assert not model_findings(resolve("sort-digits", [model])).problems


def test_a_misspelt_key_of_a_models_config_is_warned_about() -> None:
    """Beside the recipe's own. Keys that only some models of an architecture have may be meant."""
    written = (
        "agents.sorter.model.config={model_type: qwen2, hiden_size: 64, head_dim: 16, sliding_windows: 9}"
    )
    assert model_findings(resolve("sort-digits", [written])).warnings == [
        f"policy sorter: the model computes as without {key} in model.config; do you mean {near}?"
        for key, near in (("hiden_size", "hidden_size"), ("sliding_windows", "sliding_window"))
    ]


def test_sequences_longer_than_a_models_are_refused() -> None:
    findings = model_findings(resolve("sort-digits", ["agents.sorter.engine.max_context=33"]))
    (problem,) = findings.problems
    assert (problem.policy, problem.part, problem.value) == ("sorter", "config", "qwen3")
    assert problem.text == "engine.max_context=33 is more than the 32 positions that the model has"
    assert not model_findings(resolve("sort-digits", ["agents.sorter.engine.max_context=32"])).problems


def test_a_model_whose_attention_is_not_computed_here_is_refused() -> None:
    import torch  # noqa: F401  # as in a run with GPUs

    settings = ["agents.sorter.model.config={model_type: bloom, hidden_size: 64, n_layer: 2, n_head: 4}"]
    (problem,) = model_findings(resolve("sort-digits", settings)).problems
    assert (problem.part, problem.value) == ("config.model_type", "bloom")
    assert "can't be built: ValueError: BloomForCausalLM does not support an attention" in problem.text
