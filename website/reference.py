"""Pages of the reference: which public names stand on which page.

Their texts come from docstrings and stubs, which mkdocstrings reads without importing the library:
the site needs neither PyTorch nor a build. `tests/docs/test_site.py` holds that each public name
is on a page.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Public functions that have the name of the submodule they come from, and where they are written.
_WRITTEN_IN = {
    "step": "smp.step.decorator.step",
    "partition": "smp.partition.contexts.partition",
}


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
        name: name of the file, without suffix.
        title: heading of the page.
        about: a sentence below it.
        names: public names of `smp`, in the order of the page.
        modules: modules of which the page has all public names.
    """

    name: str
    title: str
    about: str
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


_STUBS = ("smp._C",)
_KINDS = ("mp", "dp", "pp", "tp", "rdp", "cp")

PAGES = (
    Page("training", "Training", "From `init` to the step function.",
         ("init", "auto", "launch", "is_initialized", "shutdown", "step", "StepOutput",
          "DistributedModel", "DistributedOptimizer",
          "clip_grad_norm_", "grad_norm", "whole_parameters", "is_tracing",
          "on_resize", "Resized", "take_over",
          "model",
          "PeerFailure", "__version__")),
    Page("ranks", "Ranks and messages",
         "Which process this is, and what processes say to each other.",
         ("rank", "size", "local_rank", "local_size",
          *(f"{kind}_{what}" for kind in _KINDS for what in ("rank", "size")),
          "barrier", *(f"{kind}_barrier" for kind in _KINDS),
          "broadcast", "send", "recv_from", "allgather", "batch_slice", "CommGroup", "RankType",
          "WORLD", *(f"{kind.upper()}_GROUP" for kind in _KINDS),
          *(f"get_{kind}_group" for kind in (*_KINDS, "world")),
          *(f"get_{kind}_process_group" for kind in (*_KINDS, "world")),
          "state", "state_mod", "utils")),
    Page("partition", "Partition and schedules", "Where modules lie, and in which order they run.",
         ("partition", "set_partition", "explain_partition", "save_partition", "schedule"),
         ("smp.schedule",)),
    Page("tensor_parallelism", "Tensor parallelism", "Layers that are split over ranks.",
         ("tensor_parallelism", "set_tensor_parallelism", "model_creation", "tp_register",
          "tp_register_with_module", "nn"),
         ("smp.nn",)),
    Page("checkpoints", "Checkpoints", "Files of a run, for any layout.",
         ("save_checkpoint", "resume_from_checkpoint", "save", "load", "save_adapters",
          "save_huggingface", "stream_parameters", "wait_for_uploads",
          "sharded_data_parallel_checkpoint"),
         ("smp.sharded_data_parallel_checkpoint",)),
    Page("memory", "Memory and precision", "What lets a model fit.",
         ("set_activation_checkpointing", "quantize", "delay_param_initialization",
          "delayed_parameter_initialization", "amp", "optimizers"),
         ("smp.amp", "smp.optimizers")),
    Page("observation", "Looking at a run", "Timelines, figures, numbers that are not finite.",
         ("trace", "detect_nonfinite", "metrics", "patches"),
         ("smp.metrics",)),
    Page("preemption", "Preemption", "Stopping all ranks at one step.",
         ("preemption", "preemption_requested"),
         ("smp.preemption",)),
    Page("integrations", "Hugging Face", "Trainer and Accelerate.", (),
         ("smp.integrations.trainer", "smp.integrations.accelerator")),
    Page("extension", "The extension",
         "Types of the C++ core, from its stub. It is no public interface: names change without "
         "notice. What they mean is written in `csrc/bindings`.", (),
         _STUBS),
)  # fmt: skip


def markdown(page: Page) -> str:
    """A page with the directives that mkdocstrings replaces."""
    parts = [f"# {page.title}", "", page.about, ""]
    for name in page.names:
        if f"smp.{name}" not in page.modules:
            parts += _directive(_WRITTEN_IN.get(name, f"smp.{name}"), f"smp.{name}")
    for module in page.modules:
        parts += _directive(module, module, all_names=module in _STUBS)
    return "\n".join(parts)


def _directive(target: str, heading: str, *, all_names: bool = False) -> list[str]:
    """Text of a name.

    Args:
        target: dotted path of the name's definition.
        heading: heading of the name on the page.
        all_names: shows names of a module without a docstring, too.
    """
    return [
        f"::: {target}",
        "    options:",
        f"      heading: {heading}",
        f"      toc_label: {heading.removeprefix('smp.')}",
        "      heading_level: 2",
        f"      show_if_no_docstring: {str(all_names).lower()}",
        "",
    ]


def index() -> str:
    """The first page: what is where."""
    lines = [
        "# Reference",
        "",
        "Made of the docstrings of the library and the stubs of its extension. Keys of the",
        "configuration and variables of the environment are in",
        "[the reference of running](../docs/running_reference.md#configuration).",
        "",
        "| page | has |",
        "|---|---|",
    ]
    for page in PAGES:
        names = page.names or page.modules
        shown = ", ".join(f"`{name}`" for name in names[:8]) + (", ..." if names[8:] else "")
        lines.append(f"| [{page.title}]({page.name}.md) | {shown} |")
    return "\n".join([*lines, ""])
