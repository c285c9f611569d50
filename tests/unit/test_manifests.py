"""Manifests of examples/kubernetes: by their structure, and by the models of the real packages.

The structure is what the page says of it, looked up by hand: no schema, and no cluster. Models of
the custom resources are those of `kubeflow-training` and `kubeflow-trainer-api`
(requirements/kubernetes.txt); without these packages that part is skipped.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


def pods(name: str) -> list[dict[str, Any]]:
    """Specifications of all pods of a manifest."""
    spec = read(name)["spec"]
    if name == "jobset.yaml":
        return [one["template"]["spec"]["template"]["spec"] for one in spec["replicatedJobs"]]
    return [one["template"]["spec"] for one in spec["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_pods_have_what_a_job_needs(name: str) -> None:
    for pod in pods(name):
        (container,) = pod["containers"]
        assert pod["terminationGracePeriodSeconds"] >= 60, "a checkpoint takes its time"
        variables = {one["name"]: one["value"] for one in container["env"]}
        config = json.loads(variables["SM_HP_MP_PARAMETERS"])
        assert config["ddp"] is True and config["pipeline_parallel_degree"] == 2
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert set(mounts.values()) == set(volumes)
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        folder = variables["SMP_PREEMPTION_PATH"]
        assert any(folder.startswith(f"{mount}/") for mount in mounts), "checkpoints outlive pods"
        assert container["command"][0] == "torchrun" and container["command"][-1] == "train.py"


def test_the_ranks_of_a_jobset_meet_at_its_first_pod() -> None:
    manifest = read("jobset.yaml")
    (job,) = manifest["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    assert template["completionMode"] == "Indexed", "else there is no JOB_COMPLETION_INDEX"
    assert template["parallelism"] == template["completions"]
    name = manifest["metadata"]["name"]
    (container,) = template["template"]["spec"]["containers"]
    options = dict(word.split("=") for word in container["command"] if "=" in word)
    assert options["--nnodes"] == str(template["completions"])
    assert options["--nproc-per-node"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert options["--master-addr"] == f"{name}-{job['name']}-0-0.{name}"
    assert manifest["spec"]["network"]["enableDNSHostnames"] is True


def test_the_pods_of_a_pytorchjob_are_one_kind() -> None:
    spec = read("pytorchjob.yaml")["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    for pod in pods("pytorchjob.yaml"):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch", "the operator looks for this name"
        assert spec["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


# ---- by the models of the packages -----------------------------------------------------


def check_jobset(manifest: dict[str, Any]) -> None:
    """Raises where the model does not know a field, or wants another type."""
    models = importlib.import_module("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
    parsed = models.JobsetV1alpha2JobSet.from_dict(manifest)
    assert json.loads(json.dumps(parsed.to_dict())) == manifest


def check_pytorchjob(manifest: dict[str, Any]) -> None:
    """The same; this model leaves the template of pods to Kubernetes' own."""
    module = importlib.import_module("kubeflow.training.models.kubeflow_org_v1_py_torch_job")
    check_swagger(module.KubeflowOrgV1PyTorchJob, manifest, "PyTorchJob")


def check_swagger(model: Any, value: dict[str, Any], where: str) -> None:
    fields = {json_name: name for name, json_name in model.attribute_map.items()}
    unknown = set(value) - set(fields)
    assert not unknown, f"{where} has no {unknown}"
    arguments = {}
    for json_name, one in value.items():
        kind = model.openapi_types[fields[json_name]]
        at = f"{where}.{json_name}"
        if kind.startswith("dict(str, Kubeflow"):
            inner = _model(kind.removeprefix("dict(str, ").removesuffix(")"))
            for key, entry in one.items():
                check_swagger(inner, entry, f"{at}.{key}")
        elif kind.startswith("Kubeflow"):
            check_swagger(_model(kind), one, at)
        else:
            expected = {"str": str, "int": int, "bool": bool}.get(kind, dict)
            assert isinstance(one, expected), f"{at} is {one!r}, not {kind}"
        arguments[fields[json_name]] = one
    model(**arguments)  # what is missing raises


def _model(name: str) -> Any:
    return getattr(importlib.import_module("kubeflow.training.models"), name)


MODELS = {
    "jobset.yaml": ("kubeflow_trainer_api", check_jobset),
    "pytorchjob.yaml": ("kubeflow.training.models", check_pytorchjob),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_models_of_the_packages_take_a_manifest(name: str) -> None:
    package, check = MODELS[name]
    pytest.importorskip(package)
    manifest = read(name)
    check(manifest)
    with pytest.raises((AssertionError, ValueError)):
        check({**manifest, "spec": {**manifest["spec"], "replicas_of": 2}})
