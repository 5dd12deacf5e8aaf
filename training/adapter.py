"""LoRA on a drafter by PEFT: what is adapted, what trains, saving, resuming, merging.

    python -m domino_spec.training.adapter --model_name_or_path DRAFTER --adapter_name_or_path ADAPTER --output_dir OUT

writes the plain drafter that a drafter and its adapter make together. Only training imports this file: to draft with
an adapter, PEFT's own `PeftModel.from_pretrained(drafter, ADAPTER)` is enough.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, field, fields

import torch
from domino_spec.configuration_domino import public_name
from domino_spec.modeling_domino import DominoForSpeculation
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, ModulesToSaveWrapper, load_peft_weights, set_peft_model_state_dict
from torch import nn
from trl import ModelConfig

HEAD, ALL, HEAD_FULL_BACKBONE = "head", "all", "head_full_backbone"
CORRECTION = ["embed_proj.0", "embed_proj.2"]
GRU_PARAMETERS = ["prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"]
PREFIX_ATTENTION = [f"prefix_attention.{name}" for name in ("in_proj", "qkv_proj", "o_proj")]
ATTENTION = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
BACKBONE = ["fc", *ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
# Of modules that train in full PEFT takes all whose names end so: these are all norms, the attention encoder's too.
NORMS = ["norm"]


@dataclass
class DrafterModelConfig(ModelConfig):
    """TRL's model options: `dtype` and `attn_implementation` are the target's, all others the drafter's."""

    lora_scope: str = field(
        default=HEAD,
        metadata={
            "help": "What --use_peft trains: the head by LoRA, backbone frozen; head and backbone by LoRA; or the "
            "head by LoRA and the backbone in full.",
            "choices": [HEAD, ALL, HEAD_FULL_BACKBONE],
        },
    )
    lora_dropout: float = field(
        default=0.0, metadata={"help": "LoRA dropout; PEFT has none for LoRA on the GRU's parameters."}
    )
    lora_task_type: str | None = field(default=None, metadata={"help": "PEFT has no task of this kind: leave it out."})


def check_options(options: DrafterModelConfig) -> None:
    """Refuse options that contradict each other or that nothing would read, before anything is loaded.

    Raises:
        ValueError: the first of them, and what to do instead.
    """
    fresh = DrafterModelConfig()
    given = [f.name for f in fields(options) if getattr(options, f.name) != getattr(fresh, f.name)]
    quantized = [name for name in given if name.startswith("load_in_") or "bnb" in name]
    if quantized:
        raise ValueError(f"--{quantized[0]} is given, but drafters are small and never quantized; drop it.")
    if options.model_name_or_path and os.path.exists(os.path.join(options.model_name_or_path, CONFIG_NAME)):
        raise ValueError(
            f"'{options.model_name_or_path}' is an adapter, not a drafter; merge it with its drafter by "
            "`python -m domino_spec.training.adapter` and go on from the result."
        )
    if not options.use_peft:
        unread = [name for name in given if name.startswith(("lora_", "use_rslora", "use_dora"))]
        if unread:
            raise ValueError(f"--{unread[0]} is given without --use_peft; add it, or drop the option.")
        return
    if not options.model_name_or_path:
        raise ValueError(
            "--use_peft adapts an existing drafter: name it by --model_name_or_path, or drop --use_peft to train a "
            "new one."
        )
    if options.lora_task_type is not None:
        raise ValueError(
            f"lora_task_type is '{options.lora_task_type}'; PEFT has no task for a drafter: leave it out."
        )
    if options.lora_r < 1:
        raise ValueError(f"lora_r is {options.lora_r}; expected a rank of at least 1.")
    if not 0 <= options.lora_dropout < 1:
        raise ValueError(f"lora_dropout is {options.lora_dropout}; expected a probability from 0 to below 1.")
    if options.lora_scope != HEAD and (options.lora_target_modules or options.lora_target_parameters):
        raise ValueError(
            f"--lora_scope {options.lora_scope} names what is adapted, and so do --lora_target_modules and "
            "--lora_target_parameters; give one or the other."
        )


def scope_targets(drafter: DominoForSpeculation, scope: str) -> tuple[list[str], list[str], list[str]]:
    """Modules and parameters that get LoRA, and modules that train in full, of a scope."""
    gru = drafter.config.causal_encoder == "gru"
    modules = CORRECTION + ([] if gru else PREFIX_ATTENTION) + (BACKBONE if scope == ALL else [])
    return modules, GRU_PARAMETERS if gru else [], BACKBONE + NORMS if scope == HEAD_FULL_BACKBONE else []


def lora_config(drafter: DominoForSpeculation, options: DrafterModelConfig) -> LoraConfig:
    """PEFT's config from TRL's options.

    Target modules or parameters that are given replace the scope's; modules to train in full come on top, and take the
    place of LoRA on the same modules.

    Raises:
        ValueError: a name that the drafter does not have, or LoRA of a kind that PEFT does not have there.
    """
    modules, parameters, full = scope_targets(drafter, options.lora_scope)
    if options.lora_target_modules or options.lora_target_parameters:
        modules, parameters = options.lora_target_modules or [], options.lora_target_parameters or []
    named = dict(drafter.named_modules())
    if isinstance(modules, str) and modules != "all-linear":
        # TRL makes a pattern of a list of one, which may have been meant as a name.
        pattern = modules not in named and any(re.fullmatch(modules, name) for name in named)
        modules = modules if pattern else [modules]
    parameters = [parameters] if isinstance(parameters, str) else parameters
    for given in options.lora_modules_to_save or []:
        full = [*full, given]
        if isinstance(modules, list):
            modules = [name for name in modules if not _inside(name, given)]
        parameters = [name for name in parameters if not _inside(name, given)]
    _check_names(named, "lora_target_modules", [] if isinstance(modules, str) else modules)
    _check_names(dict(drafter.named_parameters()), "lora_target_parameters", parameters)
    _check_names(named, "lora_modules_to_save", full)
    for name in modules if isinstance(modules, list) else []:
        if any(isinstance(module, nn.GRU) for key, module in named.items() if _inside(key, name)):
            raise ValueError(
                f"lora_target_modules names '{name}', a GRU, which PEFT cannot wrap; give --lora_target_parameters "
                f"{' '.join(GRU_PARAMETERS)}, or --lora_modules_to_save {name} to train it in full."
            )
    if parameters and (options.lora_dropout or options.use_dora):
        option = "lora_dropout" if options.lora_dropout else "use_dora"
        raise ValueError(
            f"PEFT has no {option} for LoRA on parameters ({', '.join(parameters)}); drop it, or train the encoder in "
            "full by --lora_modules_to_save prefix_gru."
        )
    if not modules and not parameters:
        raise ValueError(
            "all that would get LoRA is in lora_modules_to_save; leave something to LoRA, or train without --use_peft."
        )
    return LoraConfig(
        task_type=None,
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=full or None,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        bias="none",
    )


def _inside(name: str, module: str) -> bool:
    """Whether a dotted name is `module` or lies in it, both as PEFT reads them: from the end."""
    return f".{module}." in f".{name}."


def _check_names(known: dict, option: str, names: list[str]) -> None:
    """PEFT passes over names that match nothing, as long as another matches."""
    for name in names:
        if not any(key == name or key.endswith(f".{name}") for key in known):
            ends = sorted({key.rpartition(".")[2] for key in known})
            has = ", ".join(end for end in ends if end and not end.isdigit())
            raise ValueError(f"{option} names '{name}', which the drafter does not have; it has {has}.")


def attach_adapter(drafter: DominoForSpeculation, options: DrafterModelConfig) -> PeftModel:
    """Put a fresh adapter around a drafter's layers, in place, and freeze all else.

    The drafter is raised to float32: in bfloat16 small updates of what trains in full would vanish, and the forward
    would not be the one that the adapter is fitted to.

    Raises:
        ValueError: see `lora_config`; a head that never learned anything.
    """
    up = drafter.embed_proj[2].weight
    if not up.is_meta and not up.any():
        raise ValueError(
            "the drafter's correction head is untrained (all zero), LoRA would fit it to noise; train it without "
            "--use_peft first."
        )
    revision = None if options.model_revision == "main" else options.model_revision
    model = get_peft_model(drafter.float(), lora_config(drafter, options), revision=revision)
    # PEFT would write down where on this machine the drafter lies.
    model.peft_config["default"].base_model_name_or_path = public_name(options.model_name_or_path)
    return model


def save_adapter(model: PeftModel, directory: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, all that PEFT needs beside the drafter.

    Args:
        state_dict: the wrapped drafter's state, if others of its weights are to be saved than it has now.
    """
    # PEFT's card is a form that nobody has filled in.
    model.create_or_update_model_card = lambda directory: None
    # Looking for resized embeddings, PEFT would ask the Hub about the base, which has none.
    if state_dict is not None:
        state_dict = {f"base_model.model.{name}": tensor for name, tensor in state_dict.items()}
    model.save_pretrained(directory, save_embedding_layers=False, state_dict=state_dict)


def trained_tensors(drafter: DominoForSpeculation) -> dict[str, int]:
    """What trains, in the drafter's own names and how ("by LoRA", "in full"), with the number of parameters."""
    sizes: dict[str, int] = {}
    for name, parameter in drafter.named_parameters():
        if not parameter.requires_grad:
            continue
        label = f"{name} in full"
        if ".modules_to_save." in name:
            module, tensor = name.split(".modules_to_save.default.")
            label = f"{module}.{tensor} in full"
        elif ".lora_" in name:
            owner = name.split(".lora_")[0]
            tensor = getattr(drafter.get_submodule(owner), "parameter_name", "weight")
            label = f"{owner.replace('.base_layer', '')}.{tensor} by LoRA"
        sizes[label] = sizes.get(label, 0) + parameter.numel()
    return sizes


def describe_training(drafter: DominoForSpeculation) -> str:
    """What trains, for the log: one line for each tensor, those of all draft layers together."""
    sizes = trained_tensors(drafter)
    lines: dict[str, list[int]] = {}
    for label, size in sizes.items():
        lines.setdefault(re.sub(r"^layers\.\d+\.", "layers.*.", label), []).append(size)
    total = sum(p.numel() for p in drafter.parameters())
    listed = [f"  {label}: {' + '.join(f'{size:,}' for size in parts)}" for label, parts in lines.items()]
    return "\n".join(
        [f"trains {sum(sizes.values()):,} of {total:,} parameters, all others stay as they are:", *listed]
    )


def feature_layer(drafter: DominoForSpeculation) -> nn.Linear | None:
    """The layer that reads tapped states and trains: `fc`, its copy or its LoRA; None where nothing of that trains.

    With DoRA nothing can be scaled: its norms are those of the weights on raw features.
    """
    fc = drafter.fc
    if isinstance(fc, ModulesToSaveWrapper):
        return fc.modules_to_save["default"]
    if isinstance(fc, LoraLayer):
        return None if fc.use_dora["default"] else fc.lora_A["default"]
    return fc if fc.weight.requires_grad else None


def settle_schedule(drafter: DominoForSpeculation, args) -> None:
    """Where the backbone is frozen there is no curriculum: lambda is 0 from the first step.

    The base logits cannot move then, so their loss teaches nothing, and a stage without the head would train nothing.

    Args:
        args (DominoTrainingConfig): changed in place.
    Raises:
        ValueError: a curriculum was asked for.
    """
    if any(p.requires_grad for p in drafter.backbone_parameters()):
        return
    default = type(args).__dataclass_fields__["lambda_decay_ratio"].default
    allowed = {"stage1_ratio": (0,), "stage_switch": ("fixed",), "lambda_decay_ratio": (0, default)}
    for name, values in allowed.items():
        if getattr(args, name) not in values:
            raise ValueError(
                f"{name} is {getattr(args, name)}, but the backbone is frozen and only the head's loss can be "
                "trained: leave the option out, or train the backbone too by --lora_scope."
            )
    args.lambda_decay_ratio = 0.0


def load_adapter(model: PeftModel, directory: str) -> None:
    """An adapter's saved weights into one of the same kind, in training.

    Raises:
        ValueError: no adapter there, or one with other tensors.
    """
    if not os.path.exists(os.path.join(directory, CONFIG_NAME)):
        raise ValueError(f"no adapter in '{directory}'; resume from a checkpoint of a run with --use_peft.")
    saved = load_peft_weights(directory, device=str(model.device))
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in (saved, own)]
    if shapes[0] != shapes[1]:
        name = next(iter(dict(shapes[0].items() ^ shapes[1].items())))
        raise ValueError(
            f"the adapter in '{directory}' has {name} of {shapes[0].get(name)}, this run {shapes[1].get(name)}; "
            "resume with the LoRA options it was trained with."
        )
    set_peft_model_state_dict(model, saved)


def merge_adapter(drafter_path: str, adapter: str, output_dir: str, target_name: str | None = None) -> None:
    """Write the plain drafter that a drafter and its adapter make together, in the drafter's dtype.

    Args:
        target_name: the target it was adapted to, for its config (default: the one the drafter names).
    """
    drafter = DominoForSpeculation.from_pretrained(drafter_path)
    dtype = drafter.dtype
    # The sum in float32, rounded once.
    merged = PeftModel.from_pretrained(drafter.float(), adapter).merge_and_unload().to(dtype)
    if target_name:
        merged.config.target_name_or_path = public_name(target_name)
    merged.save_pretrained(output_dir)


def main(arguments: list[str] | None = None) -> None:
    """Read arguments, merge, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True, help="the drafter")
    parser.add_argument("--adapter_name_or_path", required=True, help="what train_peft.py --use_peft wrote")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--target_model_name_or_path", help="the target it was adapted to, recorded in the config")
    given = parser.parse_args(arguments)
    try:
        merge_adapter(
            given.model_name_or_path, given.adapter_name_or_path, given.output_dir, given.target_model_name_or_path
        )
    except (ValueError, OSError) as error:
        sys.exit(f"adapter: {error}")
    print(f"drafter saved to {given.output_dir}")


if __name__ == "__main__":
    main()
