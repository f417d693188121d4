"""The rows of the benchmark page, from the results of a run. Benchmarks that did not run have no row."""

from collections.abc import Iterable, Iterator
from typing import Any

Row = tuple[str, ...]

_PEERS = {"curvlinops": "curvlinops", "eigenthings": "hessian-eigenthings", "pyhessian": "PyHessian"}
MODELS = {"HuggingFaceGPT2": "Hugging Face's GPT-2", "PlainGPT2": "GPT-2 of torch's own layers"}


def faster(ratio: float) -> str:
    """Describe a ratio of their time to ours."""
    return f"{ratio:.3g} times faster" if ratio >= 1 else f"**{1 / ratio:.3g} times slower**"


def _bold(text: str, when: bool) -> str:
    return f"**{text}**" if when else text


def _span(values: Iterable[float]) -> str:
    found = list(values)
    return f"{min(found):.2g} to {max(found):.2g}"


def closed_forms(found: dict[str, Any]) -> Iterator[Row]:
    """One attention layer, and one block."""
    attention, block = found.get("exact_attention", {}), found.get("full_block", {})
    if dense := attention.get("dense, N=64 L=17 d=16"):
        what = "nine dense blocks of an attention layer, N = 64, L = 17, d = 16"
        ratio, aim = dense["times_faster_than_torch_func_hessian"], dense.get("aim", 250)
        yield what, f"torch.func.hessian (aim: {aim} times)", _bold(faster(ratio), ratio < aim)
        if "times_faster_than_curvlinops" in dense:
            yield what, "curvlinops", faster(dense["times_faster_than_curvlinops"])
    if dense := attention.get("dense, N=4 L=32 d=32"):
        ratio, aim = dense["times_a_memory_write"], dense.get("aim", 1.5)
        written = _bold(f"{ratio:.3g} times as long", ratio > aim)
        yield "nine dense blocks, N = 4, L = 32, d = 32", f"writing the result to memory (aim: {aim} times)", written
    for key, inputs in (("norms, N=64 L=17 d=128", "addition model"), ("norms, Gaussian inputs", "Gaussian inputs")):
        if norms := attention.get(key):
            yield (
                f"six exact norms, N = 64, L = 17, d = 128, {inputs}",
                f"Hutchinson to 1 %: {norms['hutchinson_products']:,} products",
                f"{faster(norms['times_faster_than_hutchinson'])}: {norms['exact_in_units_of_a_product']:.3g} products",
            )
    for layer in attention.get("functional norm of the keys, float32", ()):
        keys = "keys behind rotary positions" if layer["rotary"] else "keys"
        task = f"exact norm of the functional part of the {keys}, L = {layer['L']}, d = {layer['d']}, float32"
        ratio = layer["times_faster_than_32_products"]
        yield task, "estimate from 32 products", faster(ratio)
    for key, value in block.items():
        if "times_less_cpu_time" in value:
            seconds = value["cpu_seconds"]
            against = f"torch.func.hessian: {seconds['torch.func.hessian']:.3g} s"
            ratio = faster(value["times_less_cpu_time"])
            yield f"dense Hessian of a Transformer {key}", against, f"{ratio}: {seconds['ours']:.3g} s"
    if reach := block.get("largest in 16 GiB"):
        peer = "torch.func.hessian"
        yield "largest d of a block, N = 16, L = 17, in 16 GiB", f"{peer}: {_reach(reach[peer])}", _reach(reach["ours"])


def _reach(one: dict[str, Any]) -> str:
    last = one["trials"][-1]
    return f"{one['largest_d_in_16_gib_extrapolated']}, extrapolated; d = {last['d']} takes {last['gib']:.2g} GiB"


def one_layer(found: dict[str, Any]) -> Iterator[Row]:
    """Exact numbers of a GPT-2 layer by its size, in units of a product in closed form."""
    for size, layer in found.get("exact_attention", {}).get("one GPT-2 layer, float32", {}).items():
        seconds = layer["seconds"]
        unit = seconds["one product, Q, K, V, O"]
        exact = (
            f"{name}, {form}" for form in ("whole", "per head") for name in ("traces of Q, K, V, O", "norms of Q, V, O")
        )
        cells = (f"{seconds[key] / unit:.3g}" for key in (*exact, "norm of K, 32 products"))
        yield size.replace("=", " = "), f"{unit:.2g}", *cells, f"{layer['peak_gib']:.3g}"


def audited(found: dict[str, Any]) -> Iterator[Row]:
    """The audit of all linear blocks, by samples and exact."""
    one = found.get("audit", {})
    for sampled in filter(None, (some.get("sampled") for some in (one, found.get("audit_large", {})))):
        ratio, most = sampled["audit_over_sweep"], sampled["limits"]["audit_over_sweep"]
        size = f"{sampled['parameters'] / 1e6:.3g} million parameters, {sampled['tokens']:,} tokens"
        task = f"{sampled['approximations']} approximations of {sampled['blocks']} blocks, {sampled['samples']} samples"
        took = _bold(f"{ratio:.2g} times as long", ratio > most)
        yield (
            f"{size}: {task}",
            f"its sweep, {sampled['sweep_seconds']:,.0f} s",
            f"{took}; peak {sampled['peak_gib']:.2g} GiB",
        )
    if exact := one.get("exact, d = 64"):
        count = f"{exact['approximations']} approximations of {exact['blocks']} blocks"
        task = f"exact: {count} of the addition network, d = 64"
        yield task, "", f"{exact['seconds']:.2g} s"


def functional(found: dict[str, Any]) -> Iterator[Row]:
    """Exact functional parts of all layers of GPT-2 small, in gradients, and their errors."""
    one = found.get("functional", {})
    for length, row in one.get("lengths", {}).items():
        cells = (f"{gradients:.2g}" for gradients in row["gradients"].values())
        yield f"L = {length}", f"{row['gradient_seconds']:.2g}", *cells, f"{row['peak_gib']:.3g}"
    if errors := one.get("against products"):
        worst = _bold(f"{errors['largest_error']:.1e}", errors["largest_error"] > errors["aim"])
        yield f"largest relative error, L = {errors['length']}", worst, *[""] * 5, f"{errors['peak_gib']:.3g}"


def solved(found: dict[str, Any]) -> Iterator[Row]:
    """Damped solves with Gauss-Newton blocks, plain and preconditioned, compared with curvlinops' inverses."""
    one = found.get("solve", {})
    for model, measured in one.get("models", {}).items():
        for name, block in measured["blocks"].items():
            task, solves = f"{model}, `{name}`: {block['rows']:,} rows", block["solves"]
            ratio, used = block["times_faster_than_cg"]["auto"], solves["auto"]["used"]
            ours = f"{solves['auto']['products']} products, preconditioner: {used}"
            told = _bold(faster(ratio), ratio < one["limits"]["times_faster"])
            yield f"{task}, to the residual {one['tolerance']:g}", "curvlinops' CG", f"{told}: {ours}"
            if with_kfac := block.get("curvlinops CG with KFAC"):
                ratio = with_kfac["seconds"] / solves["auto"]["seconds"]
                counts = f"{with_kfac['textbook_steps']} steps, not {block['curvlinops CG']['textbook_steps']}"
                told = _bold(faster(ratio), ratio < one["limits"]["times_faster"])
                against = f"curvlinops' CG with its KFAC inverse as preconditioner: {counts}"
                yield "the same, preconditioner `auto`", against, f"{told}: {solves['auto']['products']} products"
            for other, found_one in solves.items():
                if "products" in found_one and other != "none":
                    products, plain = found_one["products"], solves["none"]["products"]
                    told = _bold(f"{products} products instead of {plain}", products > plain)
                    yield f"the same, preconditioner `{other}`", "our plain CG", told
            peer = block["curvlinops KFAC"]
            against = f"curvlinops' KFAC inverse: {peer['residual']:.2g} in {peer['seconds']:.2g} s"
            against += f", {peer['seconds'] / block['gradient_seconds']:.1f} gradients of the model"
            if ours_too := block.get("to the residual of KFAC"):
                yield "the same, to the residual of KFAC", against, faster(ours_too["times_faster"])
            else:
                yield "the same, to the residual of KFAC", against, "x = 0 has the residual 1"
            yield "the same, KFAC inverse of one random gradient", against, _inverted(block)
    yield from _preconditioned(one.get("trained", {}))


def _inverted(block: dict[str, Any]) -> str:
    """Our KFAC inverse: its residual, its time, and that without the two runs of the loss that come first."""
    ours, peer = block["our KFAC"], block["curvlinops KFAC"]["seconds"]
    rest = peer / (ours["seconds"] - ours["seconds_of_the_loss"])
    told = f"{ours['residual']:.2g}, {faster(peer / ours['seconds'])}"
    return f"{told}; without the first two runs of the loss {faster(rest)}"


def _preconditioned(one: dict[str, Any]) -> Iterator[Row]:
    """Products that preconditioners save, over the blocks of a model before and after training."""
    for steps, model in one.get("after", {}).items():
        for share, blocks in model["products"].items():
            plain, *kinds = next(iter(blocks.values()))
            totals = {kind: sum(block[kind] for block in blocks.values()) for kind in (plain, *kinds)}
            told = (_bold(f"{kind} {totals[kind]}", totals[kind] > totals[plain]) for kind in kinds)
            task = f"GPT of width {one['width']} after {steps} steps on addition, loss {model['loss']:.2g}, float64"
            what = (
                f"products of {len(blocks)} solves to {one['tolerance']:g}, damping {share} of the largest eigenvalue"
            )
            yield f"{task}: {what}", f"our plain CG: {totals[plain]}", ", ".join(told)


def influenced(found: dict[str, Any]) -> Iterator[Row]:
    """Influence scores, ours and kronfluence's, against retraining."""
    one = found.get("influence", {})
    for name, row in one.get("methods", {}).items():
        score = f"{row['datamodeling_score']:.2f} ± {row['stderr']:.2f}"
        yield name, score, f"{row['correlation_with_exact']:.3f}"


def swept(found: dict[str, Any]) -> Iterator[Row]:
    """All blocks of GPT-2 small by a sweep, compared with products, ours and curvlinops', to the same error."""
    one = found.get("sweep")
    if not one:
        return
    aims = one["limits"]
    yield from _time_and_error(one, aims, "")
    for key, peer in (("products", "our products, block by block"), ("curvlinops", "curvlinops' products")):
        yield "the same, to the same error, on a sample of blocks", peer, faster(one[f"times_faster_than_{key}"])
    ratio = one["peak_over_that_of_a_gradient"]
    memory = _bold(f"{ratio:.2g} times", ratio > aims["peak_over_that_of_a_gradient"])
    yield "peak memory", "a gradient", memory
    if "trained" in one:
        yield from _time_and_error(one["trained"], aims, ", SmolLM2-135M with trained weights")
    if "billion" in one:
        large = one["billion"]
        task = f"a Llama of {large['parameters'] / 1e9:.2g} billion parameters in bfloat16, {large['blocks']} blocks"
        peak = _bold(f"peak {large['peak_gib']:.2g} GiB", large["peak_gib"] > large["limit_gib"])
        middle, high = (100 * large[key] for key in ("median_error", "95th_percentile_of_the_error"))
        errors = f"median error of the norms {middle:.2g} %, 95th percentile {high:.2g} %"
        told = f"{large['seconds'] / 60:.2g} minutes, {peak}; {errors}"
        yield task, f"limit: {large['limit_gib']} GiB", told


def _time_and_error(one: dict[str, Any], aims: dict[str, float], model: str) -> Iterator[Row]:
    """Gradients and errors of the sweep of one model."""
    task = f"traces and norms of {one['blocks']} blocks, {one['samples']} samples{model}"
    spent = _bold(f"{one['gradients']:.3g} gradients", one["gradients"] > aims["gradients"])
    first = f"first block after {one['first_block_after_gradients']:.3g}"
    yield task, f"aim: {aims['gradients']} gradients", f"{spent}; {first}"
    middle, high = one["median_error"], one["95th_percentile_of_the_error"]
    worse = middle > aims["median_error"] or high > aims["95th_percentile_of_the_error"]
    told = _bold(f"{100 * middle:.2g} %, 95th percentile {100 * high:.2g} %", worse)
    aim = f"aim: {100 * aims['median_error']:.2g} and {100 * aims['95th_percentile_of_the_error']:.2g} %"
    yield "median relative standard error of the norms", aim, told


def overheads(found: dict[str, Any]) -> Iterator[Row]:
    """Estimates over as many bare products."""
    one = found.get("overhead", {})
    for key, ratios in one.items():
        if isinstance(ratios, dict):
            for name, ratio in ratios.items():
                where = key.rpartition(", ")[2]
                told = _bold(f"{ratio:.2f} times", ratio > one["limit"])
                yield (
                    f"{name.replace('_', ' ')} from 16 products, {where}",
                    f"16 bare products (aim: {one['limit']})",
                    told,
                )


def products(found: dict[str, Any], kind: str) -> Iterator[Row]:
    """One model: each of our products, and the same product by the peers below it."""
    one, limits = (found.get("matrix_free", {}).get(key, {}) for key in (kind, "limits_gradients_a_vector"))
    memory = {what: row["above_the_model_gib"] for what, row in one.get("memory", {}).items() if row}
    gradients = {"gradient": 1.0} | one["gradients_a_vector"] if one else {}
    for what, spent in gradients.items():
        if what.split()[0] in _PEERS:
            continue
        limit = limits.get(what)
        time = f"{spent:.3g}" if limit is None else f"{_bold(f'{spent:.3g}', spent > limit)} (aim: {limit})"
        yield _spelt(what), "torch" if what == "gradient" else "ours", time, f"{memory[what]:.2f}", ""
        for prefix, peer in _PEERS.items():
            theirs = f"{prefix} {what}"
            if theirs in gradients:
                less = round(memory.get(theirs, 0.0), 2) < round(memory[what], 2)
                gib = _bold(f"{memory[theirs]:.2f}", less) if theirs in memory else ""
                ratio = one["times_faster"][f"{what} than {theirs}"]
                yield _spelt(what), peer, f"{gradients[theirs]:.3g}", gib, faster(ratio)


def _spelt(what: str) -> str:
    return what.replace("hessian", "Hessian").replace("ggn", "Gauss-Newton").replace("functional", "functional part")


def estimates(found: dict[str, Any]) -> Iterator[Row]:
    """The questions that PyHessian also answers, and GPT-2 small."""
    asked = {"trace": "trace", "eigenvalue": "largest eigenvalue"}
    for kind, name in MODELS.items():
        one = found.get("matrix_free", {}).get(kind, {})
        for key, what in asked.items():
            ratio = one.get("times_faster", {}).get(f"{key} than pyhessian {key}")
            if ratio and "error" in one["questions"][key]:
                theirs, ours = (_answer(one["questions"][which]) for which in (f"pyhessian {key}", key))
                yield f"{name}: {what}, to the same true error", f"PyHessian: {theirs}", f"{faster(ratio)}: {ours}"
    if small := found.get("gpt2_small"):
        largest = small["lambda_max"]
        error = 100 * largest["stderr"] / largest["value"]
        peak = _bold(f"peak {small['peak_gib']:.3g} GiB", small["peak_gib"] > small["limit_gib"])
        yield (
            f"GPT-2 small, {small['parameters'] / 1e6:.0f}M parameters, L = 256: λ_max to {error:.2g} %",
            f"{small['limit_gib']} GiB",
            f"{largest['products']} products, {small['lambda_max_seconds']:.0f} s, {peak}",
        )
        every = f" of {small['of_blocks']}" if "of_blocks" in small else ""
        norms = f"{small['blocks']}{every} block norms to {100 * small['largest_relative_error_of_a_norm']:.2g} %"
        cost = f"{small['products_for_the_norms']:,} products, {small['norms_seconds'] / 60:.2g} minutes"
        yield f"GPT-2 small: {norms}", "the same", cost


def _answer(asked: dict[str, float]) -> str:
    count = f", {asked['products']} products" if "products" in asked else ""
    return f"{asked['value']:.4g}, error {100 * asked['error']:.2g} %{count}, {asked['seconds']:.2g} s"


def long_sequences(found: dict[str, Any]) -> Iterator[Row]:
    """A product through attention, compared with torch's mathematical kernel."""
    long, kernel = found.get("long_sequences", {}), "torch's mathematical kernel"
    for name, one in long.get("L=1024", {}).items():
        what = f"product, L = 1,024, {name}"
        yield what, kernel, faster(one["times_faster_than_math"])
        yield f"{what}, graph kept", kernel, faster(one["times_faster_than_math_on_a_kept_graph"])
    if not (growth := long.get("growth")):
        return
    within = {key: row for key, row in growth.items() if key.startswith("math, ")}
    for length, ours in growth["ours"].items():
        math = growth["math"].get(length)
        theirs = "not run" if math is None else f"{math['peak_mib']:.0f} MiB, {math['seconds']:.2g} s"
        for key, row in within.items():
            if key.startswith(f"math, L={length} "):
                theirs = f"{'fails' if 'fails' in row else 'runs'} {key.split(' ', 2)[2]}"
        yield (
            f"memory, L = {int(length):,}",
            f"{kernel}: {theirs}",
            f"{ours['peak_mib']:.0f} MiB, {ours['seconds']:.2g} s",
        )
    yield (
        "growth of the memory",
        f"{kernel}: L^{growth['memory_exponent_math']:.2f}",
        f"L^{growth['memory_exponent_ours']:.2f}; of the time L^{growth['time_exponent_ours']:.2f}",
    )


def ranks(found: dict[str, Any]) -> Iterator[Row]:
    """Batches spread over ranks, and a model sharded over them."""
    spread, shards = found.get("distributed", {}), found.get("sharded", {})
    models = (", 0.5 million parameters", spread, 0.0), (", GPT-2 small", spread.get("gpt2", {}), spread.get("aim"))
    for model, one, aim in models:
        for row in (row for row in one.get("ranks", []) if "of_independent" in row):
            whole, reduced = (1000 * row[key] for key in ("seconds", "all_reduce_seconds"))
            text = f"{_efficiency(row, row['of_cores'], aim)}; the sum over ranks takes {reduced:.1f} of {whole:.0f} ms"
            yield f"data-parallel product{model}, {row['ranks']} ranks on {one['cores']} cores", "one rank", text
    for row in (row for row in shards.get("ranks", []) if "times" in row):
        whole, aims, count = shards["unsharded_gib"], shards["aims"], row["ranks"]
        text = f"{row['gib']:.2f} GiB ({row['expected_gib']:.2f} by a + b/ranks)"
        yield f"FSDP2: memory of a rank, ranks: {count}", f"not sharded: {whole:.2f} GiB", text
        for rows, one in row["times"].items():
            times = f"{one['over_unsharded']:.2f} times the processor time"
            text = _bold(times, count == 1 and one["over_unsharded"] > aims["over_unsharded"])
            if count > 1:
                text += f"; {_efficiency(one, one['efficiency'], aims['efficiency'] if count == 2 else 0.0)}"
            yield f"the same, a product with {rows} rows", f"not sharded: {one['unsharded_seconds']:.2g} s", text


def _efficiency(row: dict[str, Any], reached: float, aim: float) -> str:
    first = _bold(f"efficiency {row['efficiency']:.2f}", reached < aim)
    others = (
        f"{row['of_independent']:.2f} of independent processes, {row['processor_efficiency']:.2f} by processor time"
    )
    return f"{first}, {others}"


def compiled(found: dict[str, Any]) -> Iterator[Row]:
    """Compiled products beside eager ones."""
    for one in found.get("compiled", {}).get("models", []):
        for part, name in (("total", "Hessian"), ("outer", "Gauss-Newton")):
            row = one[part]
            pays = "never" if row["products_to_pay"] is None else f"{row['products_to_pay']:,} products"
            yield (
                f"{one['model']}, {one['parameters']:,} parameters, {one['tokens']} tokens, {name}",
                f"{row['eager_milliseconds']:.3g} ms",
                f"{row['compiled_over_eager']:.2f}",
                f"{row['compile_seconds']:.0f} s",
                pays,
            )


def profiled(found: dict[str, Any]) -> Iterator[Row]:
    """Operations of a gradient and of products, in gradients, in this version and in 0.1.0."""
    one = found.get("profile")
    if not one:
        return
    now, before = (one[key]["operations"] for key in ("now", "0.1.0"))
    columns = now["gradient"], before["hessian"], now["hessian"], before["ggn"], now["ggn"]
    most = {kind: max(column.get(kind, 0.0) for column in columns) for column in columns for kind in column}
    for kind in sorted(most, key=most.__getitem__, reverse=True):
        yield kind, *(f"{column.get(kind, 0.0):.3f}" for column in columns)
    yield "all", *(f"{sum(column.values()):.3f}" for column in columns)
    for key, name in (("one thread", "one thread"), ("one thread, memory kept", "one thread, freed memory is kept")):
        yield f"{name}, without the profiler", "1.000", "", f"{one[key]['hessian']:.3f}", "", f"{one[key]['ggn']:.3f}"


def other_cpu(found: dict[str, Any]) -> Iterator[Row]:
    """Ratios with all instructions and with AVX2 only."""
    whole, less = (found.get("other_cpu", {}).get(key, {}) for key in ("all", "avx2"))
    if whole:
        yield "instructions that torch uses", "", whole["capability"], less["capability"]
    for key, (task, against) in _ELSEWHERE.items():
        if whole.get(key) and less.get(key):
            say = faster if "faster" in key else "{:.3g}".format
            yield task, against, say(whole[key]), say(less[key])


_ELSEWHERE = {
    "hessian, gradients": ("Hessian product, GPT-2 of torch's own layers", "a gradient"),
    "hessian, times faster than curvlinops": ("Hessian product, GPT-2 of torch's own layers", "curvlinops"),
    "ggn, gradients": ("Gauss-Newton product, GPT-2 of torch's own layers", "a gradient"),
    "ggn, times faster than curvlinops": ("Gauss-Newton product, GPT-2 of torch's own layers", "curvlinops"),
    "dense, times faster than torch.func.hessian": ("nine dense blocks of an attention layer", "torch.func.hessian"),
    "dense, times faster than curvlinops": ("nine dense blocks of an attention layer", "curvlinops"),
    "dense, memory writes": ("nine dense blocks, N = 4, L = 32, d = 32", "writing the result to memory"),
    "norms, times faster than Hutchinson": ("six exact norms, Gaussian inputs", "Hutchinson to 1 %"),
    "norm of the keys, times faster than 32 products": ("exact norm of the keys, L = 128", "estimate from 32 products"),
    "sweep, gradients": ("sweep of GPT-2 small", "a gradient"),
}


def large_product(found: dict[str, Any]) -> Iterator[Row]:
    """A product of a model of a billion parameters."""
    one = found.get("large_product", {})
    for row in one.get("runs", []):
        billions = f"{row['parameters'] / 1e9:.2g} billion parameters, {row['layers']} layers"
        peak = _bold(f"peak {row['peak_gib']:.3g} GiB", row["peak_gib"] > one["limit_gib"])
        told = f"{peak}, of which the weights {row['weights_gib']:.3g}; {row['seconds']:.0f} s"
        yield f"a product at {one['tokens']} tokens, {billions}", f"limit: {one['limit_gib']} GiB", told
    if "peak_gib_of_22_layers" in one:
        peak = one["peak_gib_of_22_layers"]
        said = _bold(f"peak {peak:.3g} GiB", peak > one["limit_gib"])
        yield "the same with 22 layers, by the last two rows", f"limit: {one['limit_gib']} GiB", said


def by_hand(found: dict[str, Any]) -> Iterator[Row]:
    """The monitor, the explorer, the figures."""
    for budget, one in found.get("monitor", {}).items():
        share = f"{100 * one['share_by_comparison']:.1f} % of the time"
        own = f"{100 * one['share_by_its_own_account']:.1f} % by its own account"
        kinds = {"with the update lens": one["with_update_lens"], "with details": one["with_details"]}
        count = ", ".join([f"{one['measurements']} measurements", *(f"{n} {kind}" for kind, n in kinds.items())])
        same = "the same to the bit" if one["same_to_the_bit"] else "**not the same**"
        yield (
            f"the monitor in {one.get('seconds', 60):.0f} s of training",
            budget,
            f"{share} ({own}), {count}; weights {same}",
        )
    if explorer := found.get("explorer"):
        for which, key in (("first", "first_figure_"), ("last", "")):
            median, late = (explorer[f"{key}{name}_ms"] for name in ("median", "p95"))
            aim = explorer.get("aim_ms", 150)
            text = f"median {median:.0f} ms, 95th percentile {_bold(f'{late:.0f} ms', late > aim)}"
            task = f"the explorer, a slider's move at d = 16, L = 17, to the {which} figure drawn"
            yield task, f"aim: {aim} ms", text
        settled = f"{explorer['storm_requests']} requests, settled {explorer['storm_settled_ms']:.0f} ms after the last"
        yield f"the explorer, a storm of {explorer['storm_moves']} moves", "one state at a time", settled
    for point, one in found.get("reproduce", {}).items():
        apart = 100 * one["largest relative difference of the norms"]
        text = f"{faster(one['ratio'])}; norms within {apart:.2g} %"
        yield f"fig3a, {point}, the norms of Q and V", "20 samples through curvlinops", text


_AXES = {"layers": "depth", "width": "d", "length": "L", "rows": "N", "sequences": "N"}
_SUBJECTS = {"product": "product", "layer": "exact norms"}


def started(found: dict[str, Any]) -> Iterator[Row]:
    """Processor time of starting."""
    one = found.get("start_up")
    if one is None:
        return
    above, limits, torch = one["seconds_above_torch"], one["limits_seconds"], one["seconds"]["torch"]
    told = _bold(f"{one['seconds']['help']:.2f} s", one["seconds"]["help"] > limits["help"])
    yield "`curvoscope --help`", f"aim: {limits['help']} s", told
    told = _bold(f"{max(0.0, above['import']):.2f} s more", above["import"] > limits["import"])
    yield "`import curvoscope`", f"`import torch`, {torch:.1f} s (aim: {limits['import']} s more)", told
    yield "`import curvoscope` and the first `cv.hessian`", "`import torch`", f"{above['cv.hessian']:.2f} s more"


def vectors_at_once(found: dict[str, Any]) -> Iterator[Row]:
    """Eight vectors against eight single ones."""
    one = found.get("several_vectors", {})
    for size in one.get("sizes", ()):
        ratio = size["eight_over_eight_single"]
        told = _bold(f"{ratio:.2f} of their time", ratio > one["aim"])
        task = f"product with 8 vectors, {size['parameters']:,} parameters, {size['tokens']} tokens"
        yield task, f"8 products (aim: {one['aim']})", told


def growths(found: dict[str, Any]) -> Iterator[Row]:
    """Exponents along each size."""
    for subject, axes in found.get("growth", {}).items():
        for axis, one in axes.items():
            sizes, rows = list(one["rows"]), list(one["rows"].values())
            if subject == "product":
                vectors = [int(size) if axis == "vectors" else 1 for size in sizes]
                ratios = (row["product"] / row["gradient"] / n for row, n in zip(rows, vectors, strict=True))
                beside = f"{_span(ratios)} gradients per vector"
            else:
                beside = f"{rows[0]['norms']:.2g} to {rows[-1]['norms']:.2g} s"
            if axis == "width" and subject == "product":
                beside += f", {_span(row['parameters'] / 1e6 for row in rows)} million parameters"
            what = f"{_SUBJECTS[subject]}: {_AXES.get(axis, axis)} from {sizes[0]} to {sizes[-1]}"
            yield what, f"n^{one['time_exponent']:.2f}", f"n^{one['memory_exponent']:.2f}", beside
