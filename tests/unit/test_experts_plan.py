"""Modules of experts that a plan names."""

from __future__ import annotations

from smp.replacement.plans import named_experts

PLAN = {
    "layers.*.mlp.experts": "ep_dispatch_experts",
    "layers.*.mlp.experts.up": "grouped_gemm",
    "layers.*.mlp.experts.down": "grouped_gemm",
    "layers.*.mlp.experts.norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.shared.up": "colwise",
}


def test_stars_stand_for_one_component() -> None:
    paths = ["layers.0.mlp.experts", "layers.0.mlp.experts.up", "layers.0.mlp.experts.down"]
    found = named_experts(PLAN, [*paths, "layers.10.mlp.experts", "mlp.experts", "x.layers.0.mlp"])
    assert set(found) == {"layers.0.mlp.experts", "layers.10.mlp.experts"}
    assert found["layers.0.mlp.experts"].each == {"up", "down"}
    assert found["layers.10.mlp.experts"].each == set()


def test_parameters_of_modules_that_are_not_named_do_not_count() -> None:
    assert named_experts(PLAN, ["layers.0.mlp.experts.up", "layers.0.mlp.shared.up"]) == {}


def test_what_all_experts_use_is_told_apart() -> None:
    paths = ["layers.0.mlp.experts", "layers.0.mlp.experts.norm", "layers.0.mlp.experts.up"]
    (named,) = named_experts(PLAN, paths).values()
    assert named.common == {"norm"} and named.each == {"up"}
