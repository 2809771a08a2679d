"""Where each weight of FuxiCTR's models comes from among those of recpipe's: a function for each model, from
weights by our names to weights by theirs.

Features are those of ``IDS``; models of fields take the dense ones last. A term that FuxiCTR alone has gets
the weight with which it does nothing: biases of 0 where the paper has none, zeros beside a dense value where
it makes a vector of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

DIM = 16
DENSE = ("price", "age")
IDS = ("user", "item", "category")
Weights = Mapping[str, torch.Tensor]
"""A model's parameters by their names."""


def mlp(theirs: str, ours: str, layers: int, last: str | None = None) -> dict[str, str]:
    """Names of an MLP's layers, which FuxiCTR counts with their activations, and of a linear one after it."""
    names = {f"{theirs}.mlp.{2 * n}": f"{ours}._mlp.{n}._linear" for n in range(layers)}
    names |= {f"{theirs}.mlp.{2 * layers}": last} if last else {}
    return both(names)


def both(layers: Mapping[str, str]) -> dict[str, str]:
    """The weight and the bias of each of the layers."""
    return {f"{t}.{of}": f"{o}.{of}" for t, o in layers.items() for of in ("weight", "bias")}


def named(weights: Weights, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """What has another name alone."""
    return {theirs: weights[ours] for theirs, ours in names.items()}


def rows(weights: Weights, theirs: str, ours: str) -> dict[str, torch.Tensor]:
    """The tables of ids, ``ours`` with {} for a table's name."""
    return {f"{theirs}.embedding_layers.of_{name}.weight": weights[ours.format(name)] for name in IDS}


BAGS = "embedding_bag_collection.embedding_bags.{}.weight"


def fields(weights: Weights) -> dict[str, torch.Tensor]:
    """A vector for each field: ids' rows, and the vectors that dense values are multiplied with."""
    own = {
        f"embedding_layer.embedding_layer.embedding_layers.{name}.weight": vector.unsqueeze(1)
        for name, vector in zip(DENSE, weights["fields.numbers"], strict=True)
    }
    return own | rows(weights, "embedding_layer.embedding_layer", f"fields.sparse_arch.{BAGS}")


def side_by_side(weights: Weights) -> dict[str, torch.Tensor]:
    """FuxiCTR makes a vector of each dense value: the value itself and zeros, here."""
    one = torch.eye(DIM)[:, :1]
    own = {f"embedding_layer.embedding_layer.embedding_layers.{name}.weight": one for name in DENSE}
    return own | rows(weights, "embedding_layer.embedding_layer", BAGS)


def spread(weight: torch.Tensor) -> torch.Tensor:
    """Weights of dense values and rows side by side, [..., D + n], with zeros beside each dense value."""
    dense = weight[..., : len(DENSE)].unsqueeze(-1) * torch.eye(DIM)[0]
    return torch.cat([dense.flatten(-2), weight[..., len(DENSE) :]], dim=-1)


def linear(weights: Weights, theirs: str, ours: str) -> dict[str, torch.Tensor]:
    """A linear part; its bias is a sum with others'."""
    layers = f"{theirs}.embedding_layer.embedding_layer"
    dense = {
        f"{layers}.embedding_layers.{name}.weight": weights[f"{ours}.dense.weight"][:, [n]]
        for n, name in enumerate(DENSE)
    }
    tables = rows(weights, layers, f"{ours}.embedding_bag_collection.embedding_bags.wide_{{}}.weight")
    return dense | {name: table[:, :1] for name, table in tables.items()}


def wide_deep(w: Weights) -> dict[str, torch.Tensor]:
    found = side_by_side(w) | linear(w, "lr_layer", "wide")
    found |= named(w, mlp("dnn", "deep.0", 2, "deep.1"))
    found["dnn.mlp.0.weight"] = spread(w["deep.0._mlp.0._linear.weight"])
    found["dnn.mlp.4.bias"] = w["deep.1.bias"] + w["wide.dense.bias"]
    return found


def deepfm(w: Weights) -> dict[str, torch.Tensor]:
    found = fields(w) | linear(w, "fm.lr_layer", "linear")
    return found | named(w, {"fm.lr_layer.bias": "linear.dense.bias"} | mlp("mlp", "deep.0", 2, "deep.1"))


def xdeepfm(w: Weights) -> dict[str, torch.Tensor]:
    found = fields(w) | linear(w, "lr_layer", "linear")
    found |= named(w, mlp("dnn", "deep.0", 2, "deep.1") | both({"cin.fc": "top"}))
    found["cin.fc.bias"] = w["top.bias"] + w["linear.dense.bias"]
    for n in range(2):
        layer = w[f"interaction.weights.{n}"]  # [vectors made, of the layer before, fields]
        found[f"cin.cin_layer.layer_{n + 1}.weight"] = layer.transpose(1, 2).flatten(1).unsqueeze(2)
        found[f"cin.cin_layer.layer_{n + 1}.bias"] = torch.zeros(len(layer))
    return found


def dcnv2(w: Weights) -> dict[str, torch.Tensor]:
    found = side_by_side(w) | named(w, mlp("parallel_dnn", "deep", 2) | both({"fc": "top"}))
    width = len(w["crosses.bias.0"])
    for n in range(2):
        kernel = spread(spread(w[f"crosses.kernels.{n}"]).T).T
        found[f"crossnet.cross_layers.{n}.weight"] = kernel
        found[f"crossnet.cross_layers.{n}.bias"] = spread(w[f"crosses.bias.{n}"].squeeze(1))
    found["parallel_dnn.mlp.0.weight"] = spread(w["deep._mlp.0._linear.weight"])
    crossed, deep = w["top.weight"].tensor_split([width], dim=1)
    return found | {"fc.weight": torch.cat([spread(crossed), deep], dim=1)}


def autoint(w: Weights) -> dict[str, torch.Tensor]:
    found = fields(w) | named(w, mlp("dnn", "deep.0", 1, "deep.1") | both({"fc": "top"}))
    for n in range(2):
        projected = w[f"interacting.{n}.attention.project.weight"].chunk(3)
        for name, weight in zip(("W_q", "W_k", "W_v"), projected, strict=True):
            found[f"self_attention.{n}.{name}.weight"] = weight
    return found | {"self_attention.0.W_res.weight": w["interacting.0.residual.weight"]}


def finalmlp(w: Weights) -> dict[str, torch.Tensor]:
    found = fields(w)
    for n, layers in enumerate((2, 1)):
        names = mlp(f"mlp{n + 1}", f"mlps.{n}", layers)
        names |= mlp(f"fs_module.fs{n + 1}_gate", f"gates.{n}.mlp.0", 1, f"gates.{n}.mlp.1")
        found |= named(w, names | {f"fs_module.fs{n + 1}_ctx_bias": f"gates.{n}.always"})
    found |= named(w, both({"fusion_module.w_x": "fusion.left"}))
    found["fusion_module.w_y.weight"] = w["fusion.right.weight"]
    found["fusion_module.w_y.bias"] = torch.zeros(1)
    return found | {"fusion_module.w_xy": w["fusion.products"].flatten(0, 2)}


def masknet(w: Weights) -> dict[str, torch.Tensor]:
    found = fields(w) | named(w, both({"mask_net.fc.0": "top"}))
    for n in range(2):
        theirs, ours = f"mask_net.mask_blocks.{n}", f"blocks.{n}"
        layers = {f"{theirs}.mask_layer.0": f"{ours}.mask.0._mlp.0._linear"}
        layers |= {f"{theirs}.mask_layer.2": f"{ours}.mask.1", f"{theirs}.hidden_layer.1": f"{ours}.norm"}
        found |= named(w, both(layers))
        found[f"{theirs}.hidden_layer.0.weight"] = w[f"{ours}.masked.weight"]
    norms = zip(w["norm.scale"], w["norm.shift"], strict=True)
    for n, (scale, shift) in enumerate(norms):
        found |= {f"emb_norm.{n}.weight": scale, f"emb_norm.{n}.bias": shift}
    return found


def wukong(w: Weights) -> dict[str, torch.Tensor]:
    found = fields(w) | named(w, mlp("fc", "top.0", 1, "top.1"))
    for n in range(2):
        ours, theirs = f"layers.{n}", f"wukong_stack.{n}"
        names = both(
            {f"{theirs}.fmb.layer_norm": f"{ours}.products.norm", f"{theirs}.layer_norm": f"{ours}.norm"}
        )
        names |= mlp(f"{theirs}.fmb.mlp", f"{ours}.products.mlp.0", 1, f"{ours}.products.mlp.1")
        found |= named(w, names | {f"{theirs}.lcb.linear.weight": f"{ours}.mixtures.mix.weight"})
        found[f"{theirs}.fmb.proj_Y"] = w[f"{ours}.products.compress.weight"].T
    found["wukong_stack.0.residual_proj.weight"] = w["layers.0.residual.mix.weight"]
    found["wukong_stack.0.residual_proj.bias"] = torch.zeros(len(w["layers.0.residual.mix.weight"]))
    return found


def histories(w: Weights) -> dict[str, torch.Tensor]:
    """Tables with histories have row 0 for what is not there."""
    tables = {"user": w["context." + BAGS.format("user")]}
    for name in ("item", "category"):
        weight = w[f"histories.embedding_collection.embeddings.{name}.weight"]
        tables[name] = torch.cat([torch.zeros(1, DIM), weight])
    of_all = [*zip(IDS, IDS, strict=True), ("items", "item"), ("categories", "category")]
    return {f"embedding_layer.embedding_layers.of_{name}.weight": tables[of] for name, of in of_all}


def without_constant(w: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of the last MLP's first layer: without dense features, ours has an input of 1."""
    weight = w["top.0._mlp.0._linear.weight"]
    return weight[:, 1:], w["top.0._mlp.0._linear.bias"] + weight[:, 0]


def din(w: Weights) -> dict[str, torch.Tensor]:
    found = histories(w) | named(w, mlp("dnn", "top.0", 2, "top.1"))
    found["dnn.mlp.0.weight"], found["dnn.mlp.0.bias"] = without_constant(w)
    near, theirs = "interests.0.nearness", "attention_layers.0.attention_layer.mlp"
    event, target, less, product = w[f"{near}.0._mlp.0._linear.weight"].chunk(4, dim=1)
    found |= named(w, both({f"{theirs}.0": f"{near}.0._mlp.0._linear", f"{theirs}.2": f"{near}.1"}))
    found[f"{theirs}.0.weight"] = torch.cat([target, event, -less, product], dim=1)
    slopes = w[f"{near}.0._mlp.0._activation_fn.weight"].expand(len(event))
    return found | {f"{theirs}.1.weight": slopes}


def dien(w: Weights) -> dict[str, torch.Tensor]:
    found = histories(w) | named(w, mlp("dnn", "top.0", 2, "top.1"))
    weight, found["dnn.mlp.0.bias"] = without_constant(w)
    user, target, interest = weight.tensor_split([DIM, 3 * DIM], dim=1)
    found["dnn.mlp.0.weight"] = torch.cat([interest, user, target], dim=1)
    ours, gru = "evolutions.0", "evolving_modules.0.gru_cell"
    found["attention_modules.0.W_kernel"] = w[f"{ours}.nearness.weight"]
    for of in ("weight", "bias"):
        for layer in ("ih", "hh"):
            name = f"{of}_{layer}_l0"
            found[f"extraction_modules.0.{name}"] = w[f"{ours}.extractor.{name}"]
        for their, own in (("x2h", "of_inputs"), ("h2h", "of_state")):
            reset, update, new = w[f"{ours}.evolving.{own}.{of}"].chunk(3)
            found[f"{gru}.{their}.{of}"] = torch.cat([update, reset, new])
    return found


PLACES = (0, 3, 1, 2)
"""Of the dense vector, the user, the item and the category in recpipe's products, as Meta's are ordered."""


def tbsm(w: Weights) -> dict[str, torch.Tensor]:
    tables = {"user": w["sparse_arch." + BAGS.format("user")]}
    for name in ("item", "category"):
        weight = w[f"histories.embedding_collection.embeddings.{name}.weight"]
        tables[name] = torch.cat([torch.zeros(1, DIM), weight])
    found = {f"dlrm.emb_l.{n}.weight": tables[name] for n, name in enumerate(IDS)}
    ours, its = "series.0", {}
    its |= {f"dlrm.bot_l.{2 * n}": f"dense_arch.model._mlp.{n}._linear" for n in range(2)}
    its |= {"dlrm.top_l.0": f"{ours}.top.0._mlp.0._linear", "dlrm.top_l.2": f"{ours}.top.1"}
    its |= {"ams.0.mlp.0": f"{ours}.weighting.0._mlp.0._linear", "ams.0.mlp.2": f"{ours}.weighting.1"}
    its |= {"mlps.0.0": "top.0._mlp.0._linear", "mlps.0.2": "top.1"}
    found |= named(w, both(its))
    ordered = [pair for row in range(4) for pair in ((row, column) for column in range(row))]
    pairs = torch.triu_indices(4, 4, 1).T.tolist()
    places = [pairs.index(sorted((PLACES[row], PLACES[column]))) for row, column in ordered]
    dense, products = found["dlrm.top_l.0.weight"].tensor_split([DIM], dim=1)
    found["dlrm.top_l.0.weight"] = torch.cat([dense, products[:, places]], dim=1)
    return found | {"ams.0.A": w[f"{ours}.inner"].unsqueeze(0)}


def two_tower(w: Weights) -> dict[str, torch.Tensor]:
    found = {f"ebc.embedding_bags.t_of_{name}.weight": w[BAGS.format(name)] for name in ("user", "item")}
    for tower in ("query", "candidate"):
        names = {0: f"{tower}.layers.0._mlp.0._linear", 1: f"{tower}.layers.1"}
        found |= named(w, both({f"{tower}_proj._mlp.{n}._linear": own for n, own in names.items()}))
    return found


def dssm(w: Weights) -> dict[str, torch.Tensor]:
    tables = {"user": w[BAGS.format("user")]}
    tables |= {n: torch.cat([torch.zeros(1, DIM), w[BAGS.format(n)]]) for n in ("item", "category")}
    of_all = [*zip(IDS, IDS, strict=True), ("items", "item"), ("categories", "category")]
    found = {f"embedding_layer.embedding_layers.of_{name}.weight": tables[of] for name, of in of_all}
    for theirs, ours in (("user_tower", "query.layers"), ("item_tower", "candidate.layers")):
        found |= named(w, mlp(theirs, f"{ours}.0", 1, f"{ours}.1"))
    return found


def bst(w: Weights) -> dict[str, torch.Tensor]:
    found = histories(w) | named(w, mlp("dnn", "top.0", 2, "top.1"))
    weight, found["dnn.mlp.0.bias"] = without_constant(w)
    user, seen = weight.tensor_split([DIM], dim=1)
    found["dnn.mlp.0.weight"] = torch.cat([user, torch.zeros(len(user), 2 * DIM), seen], dim=1)
    ours, theirs = "behaviors.0.blocks.0", "transformer_encoders.0.transformer_blocks.0"
    names = {"ffn.0": "first", "ffn.2": "second", "layer_norm1": "norms.0", "layer_norm2": "norms.1"}
    found |= named(w, both({f"{theirs}.{their}": f"{ours}.{own}" for their, own in names.items()}))
    found["transformer_encoders.0.position_emb"] = w["behaviors.0.places"]
    for their, own in (("in_proj_", "attention.project"), ("out_proj.", "joined")):
        found[f"{theirs}.attention.{their}weight"] = w[f"{ours}.{own}.weight"]
        found[f"{theirs}.attention.{their}bias"] = torch.zeros(len(w[f"{ours}.{own}.weight"]))
    return found


def gates(w: Weights, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Linear layers before a softmax, of which FuxiCTR's have biases."""
    found = {f"{theirs}.mlp.0.weight": w[f"{ours}.weigh.weight"] for theirs, ours in names.items()}
    return found | {
        f"{theirs}.mlp.0.bias": torch.zeros(len(found[f"{theirs}.mlp.0.weight"])) for theirs in names
    }


def over_wide(found: dict[str, torch.Tensor], first: str) -> dict[str, torch.Tensor]:
    """With the weights of all layers whose names begin with ``first`` and that see the inputs spread."""
    width = len(DENSE) + DIM * len(IDS)
    return {
        name: spread(weight) if name.startswith(first) and weight.shape[-1] == width else weight
        for name, weight in found.items()
    }


def towers(w: Weights) -> dict[str, torch.Tensor]:
    return {
        k: v
        for n in range(2)
        for k, v in named(w, mlp(f"tower.{n}", f"towers.{n}.0", 1, f"towers.{n}.1")).items()
    }


def shared_bottom(w: Weights) -> dict[str, torch.Tensor]:
    return side_by_side(w) | over_wide(towers(w) | named(w, mlp("bottom", "bottom", 2)), "bottom")


def mmoe(w: Weights) -> dict[str, torch.Tensor]:
    found = towers(w) | gates(w, {f"mmoe_layer.gate.{n}": f"gates.{n}" for n in range(2)})
    for n in range(3):
        found |= named(w, mlp(f"mmoe_layer.experts.{n}", f"experts.mlps.{n}", 2))
    return side_by_side(w) | over_wide(found, "mmoe_layer")


def ple(w: Weights) -> dict[str, torch.Tensor]:
    layer, ours = "cgc_layers.0", "layers.0"
    found = towers(w) | gates(w, {f"{layer}.gate.{n}": f"{ours}.gates.{n}" for n in range(2)})
    for n in range(2):
        for label in range(2):
            names = mlp(f"{layer}.specific_experts.{label}.{n}", f"{ours}.experts.{label}.mlps.{n}", 2)
            found |= named(w, names)
        found |= named(w, mlp(f"{layer}.shared_experts.{n}", f"{ours}.experts.2.mlps.{n}", 2))
    found[f"{layer}.gate.2.mlp.0.weight"] = torch.zeros(2, len(DENSE) + DIM * len(IDS))
    found[f"{layer}.gate.2.mlp.0.bias"] = torch.zeros(2)
    return side_by_side(w) | over_wide(found, layer)
