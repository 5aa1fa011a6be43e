"""The 500M, 1.5B and 8B models: memory of a node and bytes of an iteration, counted and by formula.

Nothing is allocated: the project's own model, stages, optimizer, programs and rings are traced
with abstract shapes (`jax.eval_shape`), and what comes out is added up.
`skippipe_jax.models.footprint` says the same by formulas, which docs/memory_formulas.md derives;
`largest_difference` holds the two together.

models   for each of configs/{500m,1.5b,8b}.yaml: memory of a node of each stage, by part; what a
         microbatch in flight keeps under each recomputation; bytes of an iteration
cuts     for each model and size of memory, how many blocks a data node and an inner node hold at
         most, and the cut into fewest stages whose nodes all fit
compiled what XLA plans for one backward pass and one loss on this machine's processor, without
         running it, as a check of the formulas for what an operation makes while it runs (not in a
         quick run)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Search

from experiments.paper import drawing
from skippipe_jax.config import Config, load_config
from skippipe_jax.config.model import AUTO, RECOMPUTE, XLA
from skippipe_jax.models.estimate import planned_case_and_visits
from skippipe_jax.models.footprint import blocks_at_once, offloadable_bytes, passing_bytes, traffic
from skippipe_jax.models.in_flight import USABLE_SHARE
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.models.node_memory import (
    OFFLOADS,
    bytes_of_loss,
    memory_of_node,
    memory_of_stages,
)
from skippipe_jax.program.compiler import compile_plan
from skippipe_jax.runtime.ring import Ring
from skippipe_jax.runtime.stage_functions import (
    TOTALS,
    activation,
    functions_of_stage,
    wire_of_run,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "shapes"
CONFIGS = Path(__file__).parent / "configs"
MODELS = ("500m", "1.5b", "8b")
MEMORY_GB = (16, 24, 40, 80)
PARTS = ("parameters", "gradients", "optimizer", "in_flight", "waiting", "working")


def measure(quick: bool, folder: Path) -> dict[str, Any]:
    """Count and compute everything, in seconds; but for a quick run, compile some of it too."""
    del folder
    models, cuts, compiled = {}, {}, {}
    for name in MODELS:
        config = load_config(CONFIGS / f"{name}.yaml")
        case, visits = planned_case_and_visits(config, CONFIGS)
        models[name] = compared(config, case, visits)
        cuts[name] = cuts_of(config, case)
        if not quick:
            compiled[name] = compiled_working(config, case)
        print(
            f"{NAME}: {name}: formulas within {models[name]['largest_difference']:.2%}", flush=True
        )
    return {"usable_share": USABLE_SHARE, "models": models, "cuts": cuts, "compiled": compiled}


def compared(config: Config, case: Case, visits: int) -> dict[str, Any]:
    """One model, counted and by formula."""
    layers = config.model.stage_partition(len(case.stages))
    formulas = memory_of_stages(config, case)
    stages, differences = [], []
    for stage, formula in enumerate(formulas):
        counted = counted_memory(config, layers[stage], is_data_stage=stage == 0)
        by_formula = dataclasses.asdict(formula)
        differences += [relative(by_formula[part], count) for part, count in counted.items()]
        sizes = by_formula | {"in_flight": formula.in_flight * formula.kept}
        stages.append(
            {
                "layers": layers[stage],
                "replicas": case.stages[stage],
                "microbatches_in_flight": formula.in_flight,
                "counted": counted,
                "by_formula": {part: sizes[part] for part in PARTS} | {"total": formula.total},
            }
        )
    plan = make_plan(case, "balanced", Search())
    sent = dataclasses.asdict(traffic(config, case, visits))
    counted_sent = counted_traffic(config, plan)
    differences += [relative(sent[part], count) for part, count in counted_sent.items()]
    return {
        "parameters": sum(map(parameter_count, stage_shapes(config.model, len(layers)))),
        "stages": stages,
        "bytes_per_iteration": {"counted": counted_sent, "by_formula": sent},
        "balanced_plan": dataclasses.asdict(plan.predicted),
        "kept_by_recompute": kept_by_recompute(config, layers[1]),
        "largest_difference": max(differences),
    }


def relative(value: float, reference: float) -> float:
    """How far a value is from a reference, as a share of that."""
    return abs(value / reference - 1.0) if reference else float(value != 0)


def counted_memory(config: Config, layers: int, *, is_data_stage: bool) -> dict[str, int]:
    """Bytes on a node of a stage, and those that a microbatch in flight keeps, by part."""
    parameters, optimizer, gradients = shapes(config, layers, is_data_stage)
    data, of_forward = config.data, size(saved(config, layers, is_data_stage))
    if config.model.recompute == OFFLOADS:
        of_forward -= layers * offloadable_bytes(config.model, data)
    targets = jax.ShapeDtypeStruct((data.microbatch_size, data.sequence_length), jnp.int32)
    return {
        "parameters": size(parameters),
        "gradients": size(gradients),
        "optimizer": size(optimizer),
        "kept": of_forward + is_data_stage * size(targets),
        "working": counted_working(config, layers, is_data_stage),
    }


def counted_working(config: Config, layers: int, is_data_stage: bool) -> int:
    """What the largest operation makes and gives back, as the configuration's functions make it."""
    parameters, _, gradients = shapes(config, layers, is_data_stage)
    again = blocks_at_once(config.model, layers)
    keeping = with_model(config, recompute="none")
    made = size(saved(keeping, again, False))
    # Nothing but XLA's plan tells what passes within a block; see `compiled_working`.
    made += passing_bytes(config.model, config.data)
    if is_data_stage:
        made = max(made - size(parameters.get("head")), made_by_loss(config, layers))
    wire = wire_of_run(config)
    # A backward takes its inputs and a gradient, and gives another one.
    converted = [
        how.computed
        for how in (wire.activations, wire.gradients, wire.gradients)
        if how.travelling != how.computed
    ]
    return max(size(parameters) + made + size(converted), size(gradients))


def shapes(config: Config, layers: int, is_data_stage: bool) -> tuple[Any, Any, Any]:
    """Of parameters, optimizer state and gradients of a stage."""
    return jax.eval_shape(
        functions_of_stage(config, is_data_stage, layers).create, jax.random.key(0), 0
    )


def saved(config: Config, layers: int, is_data_stage: bool) -> Any:
    """Shapes of what one forward pass leaves for its backward pass."""
    own = functions_of_stage(config, is_data_stage, layers)
    inputs = wire_of_run(config).activations.travelling
    if is_data_stage:
        marked = (2,) if config.data.packing == "documents" else ()
        inputs = jax.ShapeDtypeStruct((*inputs.shape[:2], *marked), jnp.int32)
    parameters, _, _ = shapes(config, layers, is_data_stage)
    gauge = jax.ShapeDtypeStruct((2,), jnp.int32)
    return jax.eval_shape(own.forward, parameters, gauge, inputs)[1]


def made_by_loss(config: Config, layers: int) -> int:
    """Bytes of the logits that are there at a time, and of their gradient as it is multiplied.

    They are found in the program of the loss, whose products are those of the head: the first
    gives logits, and the two others share the gradient.
    """
    loss = functions_of_stage(config, True, layers).loss
    traced = jax.make_jaxpr(loss)(*arguments_of_loss(config, layers))
    first, *others = _products(traced.jaxpr)
    [gradient] = set.intersection(*(set(product.invars) for product in others))
    return size([first.outvars[0].aval, gradient.aval])


def arguments_of_loss(config: Config, layers: int) -> list[Any]:
    """Shapes of what the loss of a data stage takes."""
    parameters, _, gradients = shapes(config, layers, True)
    totals, gauge = (jax.ShapeDtypeStruct(*of) for of in (((TOTALS,), jnp.float32), ((2,), int)))
    inputs = activation(config.model, config.data)
    targets = jax.ShapeDtypeStruct(inputs.shape[:2], jnp.int32)
    return [parameters, gradients, totals, gauge, inputs, targets]


def _products(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and of those within it, that multiply matrices."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _products(inner.jaxpr)


def counted_traffic(config: Config, plan: Plan) -> dict[str, int]:
    """What programs and rings of a plan send, every transfer counted."""
    wire = wire_of_run(config)
    hop, gradient_hop = size(wire.activations.travelling), size(wire.gradients.travelling)
    [program] = compile_plan(plan, [0] * len(plan.case.nodes))
    # Of every two hops, one goes forward and the other back.
    each_way = len(program.hops) // 2
    averaged = jnp.dtype(config.network.averaging_dtype or "float32").itemsize
    averaging = 0
    for stage, layers in enumerate(config.model.stage_partition(len(plan.stages))):
        parameters, _, _ = shapes(config, layers, stage == 0)
        nodes, length = plan.stages[stage], parameter_count(parameters)
        ring = Ring.of(plan.case, stage, nodes, length, width=averaged)
        hops = len(nodes) * ring.steps * ring.chunks
        averaging += hops * ring.chunk_length * averaged
    return {
        "hop": hop,
        "gradient_hop": gradient_hop,
        "pipeline": each_way * (hop + gradient_hop),
        "averaging": averaging,
    }


def kept_by_recompute(config: Config, layers: int) -> dict[str, dict[str, int]]:
    """What a microbatch in flight keeps on a node of an inner stage, and what a backward makes."""
    result = {}
    for recompute in RECOMPUTE:
        own = with_model(config, recompute=recompute)
        counted = counted_memory(own, layers, is_data_stage=False)
        result[recompute] = {part: counted[part] for part in ("kept", "working")}
    return result


def with_model(config: Config, **changes: Any) -> Config:
    """The configuration with another model."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def size(tree: Any) -> int:
    """Bytes of all arrays of a tree of shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled_working(config: Config, case: Case) -> dict[str, dict[str, int]]:
    """Bytes that a backward pass and a loss need for a while, as XLA plans it and by formula."""
    layers, memory = config.model.stage_partition(len(case.stages)), memory_of_stages(config, case)
    loss: Any = functions_of_stage(config, True, layers[0]).loss
    planned = loss.lower(*arguments_of_loss(config, layers[0])).compile().memory_analysis()
    formula = memory[0].parameters + bytes_of_loss(config.model, config.data)
    result = {"loss": {"xla": planned.temp_size_in_bytes, "formula": formula}}
    for stage, kind in ((0, "data"), (1, "inner")):
        own = functions_of_stage(config, stage == 0, layers[stage])
        parameters, _, gradients = shapes(config, layers[stage], stage == 0)
        kept = saved(config, layers[stage], stage == 0)
        gauge, cotangent = (
            jax.ShapeDtypeStruct((2,), jnp.int32),
            activation(config.model, config.data),
        )
        backward: Any = own.backward
        lowered = backward.lower(parameters, gradients, gauge, kept, cotangent)
        planned = lowered.compile().memory_analysis()
        result[kind] = {"xla": planned.temp_size_in_bytes, "formula": memory[stage].working}
    return result


def cuts_of(config: Config, case: Case) -> dict[str, dict[str, Any]]:
    """For each size of memory what fits, by kind of attention.

    What GPUs and TPUs keep, which have kernels of their own, is by formula alone.
    """
    return {
        attention: {
            f"{gb} GB": what_fits(
                with_model(config, attention=attention), case, USABLE_SHARE * gb * 1e9
            )
            for gb in MEMORY_GB
        }
        for attention in (AUTO, XLA)
    }


def what_fits(config: Config, case: Case, usable_bytes: float) -> dict[str, Any]:
    """The most blocks of a node that may hold so many bytes, 0 for none, and the coarsest cut."""
    most = (
        max((n for n in range(1, config.model.layers) if total(n) <= usable_bytes), default=0)
        for total in (partial(_total, config, case, 0), partial(_total, config, case, 1))
    )
    return dict(zip(("data_blocks", "inner_blocks"), most, strict=True)) | {
        "coarsest": cut_for(config, case, usable_bytes)
    }


def cut_for(config: Config, case: Case, usable_bytes: float) -> dict[str, Any] | None:
    """The cut into fewest stages whose nodes hold no more than so many bytes, if there is one.

    Of all cuts into so many stages, the one whose largest node is smallest.
    """
    for stages in range(2, config.model.layers + 1):
        largest, cut = min(_cuts_into(config, case, stages))
        if largest <= usable_bytes:
            return {"stage_layers": cut, "largest_node_bytes": largest}
    return None


def _cuts_into(config: Config, case: Case, stages: int) -> Iterator[tuple[int, list[int]]]:
    """Bytes of the largest node, and the blocks of each stage, the inner ones spread evenly."""
    inner = stages - 1
    for data_layers in range(1, config.model.layers - inner + 1):
        rest = config.model.layers - data_layers
        cut = [data_layers, *(rest // inner + (s < rest % inner) for s in range(inner))]
        yield max(_total(config, case, stage, cut[stage]) for stage in (0, 1)), cut


def _total(config: Config, case: Case, stage: int, layers: int) -> int:
    return memory_of_node(
        config,
        layers,
        is_data_stage=stage == 0,
        replicas=2,
        in_flight=case.nodes[0].memory,
        under_way=case.stages[0] * case.nodes[0].memory,
    ).total


COLOURS = ("#2f5fa8", "#5b8fc7", "#9fbfe0", "#2f8f7a", "#9ccdbf", "#c9843b")


def draw(figures: dict[str, Any]) -> Figure:
    """Memory by part, what recomputation saves, and what an iteration sends."""
    figure, [[memory], [kept, sent]] = drawing.panels((1, 2), 4.2, 3.6)
    models = figures["models"]
    _draw_memory(memory, models)
    by_recompute = {
        recompute: [own["kept_by_recompute"][recompute]["kept"] / 1e9 for own in models.values()]
        for recompute in list(RECOMPUTE)[:3]
    }
    _draw_bars(kept, list(models), by_recompute, COLOURS[::2], "%.2g")
    kept.set_yscale("log")
    kept.set_ylim(top=kept.get_ylim()[1] * 6)
    kept.set_ylabel("GB kept by one microbatch in flight")
    kept.set_title("An inner stage, by model.recompute")
    parts = {"activations and gradients": "pipeline", "averaging": "averaging"}
    by_part = {
        name: [own["bytes_per_iteration"]["by_formula"][part] / 1e9 for own in models.values()]
        for name, part in parts.items()
    }
    _draw_bars(sent, list(models), by_part, (COLOURS[3], COLOURS[5]), "%.1f")
    sent.margins(y=0.25)
    sent.set_ylabel("GB sent in an iteration, all nodes")
    sent.set_title("What an iteration sends")
    return figure


def _draw_memory(axes: Axes, models: Mapping[str, Any]) -> None:
    rows = [
        (f"{name}, {kind} node", model["stages"][stage]["by_formula"])
        for name, model in models.items()
        for stage, kind in ((0, "data"), (1, "inner"))
    ]
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        sizes = [own[part] / 1e9 for _, own in rows]
        axes.barh(range(len(rows)), sizes, left=left, color=colour, label=part.replace("_", " "))
        left = [start + more for start, more in zip(left, sizes, strict=True)]
    for row, end in enumerate(left):
        axes.text(end + 0.4, row, f"{end:.1f}", va="center", backgroundcolor="white")
    for gb in MEMORY_GB[:3]:
        axes.axvline(gb, color="#171b22", linestyle="--", linewidth=0.8)
        axes.text(gb, -0.75, f"{gb} GB", ha="center", va="bottom")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xlim(0, 1.12 * max(*left, MEMORY_GB[2]))
    axes.set_xlabel("GB on a node, with as many microbatches in flight as the case allows")
    axes.set_title("What a node holds", pad=18)
    axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.45, -0.16))


def _draw_bars(
    axes: Axes,
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    form: str,
) -> None:
    """Bars side by side in groups: of each label the values, one in each group."""
    width = 0.8 / len(values)
    for place, ((label, own), colour) in enumerate(zip(values.items(), colours, strict=True)):
        aside = (place - (len(values) - 1) / 2) * width
        x = [number + aside for number in range(len(groups))]
        axes.bar_label(axes.bar(x, own, width, color=colour, label=label), fmt=form, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(loc="upper left")
