"""Target states computed once and read ever after: in memory, or on disk as safetensors shards and an index.

A directory holds `index.json` (what the states were made for, and which rows each shard has) and shards
`states-00000.safetensors` with two tensors a row: `{key}.tapped [E, T * H]` for positions 0 to E - 1, and
`{key}.final [M, H]` for the last M of these. E is the position of the row's last supervised token, so nothing is kept
that no block reads; M counts the positions whose law a supervised token was drawn from. A shard gets its name when it
is whole and is listed after that, so an interrupted writer leaves nothing that could be read by mistake.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from accelerate import PartialState
from domino_spec.training.answers import prompt_key
from domino_spec.training.data import BlockCollator
from domino_spec.training.objective import TargetStates, target_states
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

INDEX = "index.json"
SHARD_BYTES = 128 * 2**20
OPEN_SHARDS = 64
GIB = 2**30


def supervised_span(supervised: list[int]) -> tuple[int, int]:
    """Positions of the first and the last supervised token that has something before it; (1, 1) without any."""
    places = [i for i, flag in enumerate(supervised) if flag and i]
    return (places[0], places[-1]) if places else (1, 1)


def row_key(input_ids: list[int], supervised: list[int]) -> str:
    """Stable name of a row: its token ids, and how far its states are kept."""
    first, last = supervised_span(supervised)
    return f"{prompt_key(input_ids)}-{first}-{last}"


def fingerprint(target) -> str:
    """Short hash of a few numbers of every weight, in which a fine-tuned copy differs."""
    digest = hashlib.sha256()
    for name, parameter in target.named_parameters():
        digest.update(name.encode() + parameter.detach().flatten()[:8].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def kept_dtype(target, dtype: str) -> tuple[str, str]:
    """Names of the target's dtype and of the one its states are kept in; "auto" is the same.

    Raises:
        ValueError: a dtype that is none of auto, float32, bfloat16 and float16.
    """
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"states_dtype is '{dtype}'; expected auto, float32, bfloat16 or float16.")
    own = str(target.dtype).removeprefix("torch.")
    return own, own if dtype == "auto" else dtype


@dataclass(frozen=True)
class StatesFormat:
    """What a store's states were made for; two stores with equal formats are interchangeable.

    Args:
        target, fingerprint: name of the target and `fingerprint` of its weights.
        target_dtype: dtype the target ran in.
        layer_ids: tapped layers.
        hidden_size: of the target.
        dtype: dtype the states are kept in.
    """

    target: str
    fingerprint: str
    target_dtype: str
    layer_ids: list[int]
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, target, layer_ids: list[int], dtype: str = "auto") -> StatesFormat:
        """Format for this target; dtype "auto" is the target's own, which loses nothing.

        Raises:
            ValueError: a dtype that is none of auto, float32, bfloat16 and float16.
        """
        own, kept = kept_dtype(target, dtype)
        return cls(
            target=os.path.basename(os.path.normpath(target.config._name_or_path or "target")),
            fingerprint=fingerprint(target),
            target_dtype=own,
            layer_ids=list(layer_ids),
            hidden_size=target.config.get_text_config().hidden_size,
            dtype=kept,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def row_bytes(self, supervised: list[int]) -> int:
        """Bytes that the states of one row take."""
        first, last = supervised_span(supervised)
        return (last * len(self.layer_ids) + last - first + 1) * self.hidden_size * self.torch_dtype.itemsize

    def cut(self, states: TargetStates, i: int, supervised: list[int]) -> TargetStates:
        """What is kept of row `i` of a batch: tapped `[E, T * H]`, final `[M, H]`."""
        first, last = supervised_span(supervised)
        kept = (states.tapped[i, :last], states.final[i, first - 1 : last])
        return TargetStates(*(part.to(self.torch_dtype).cpu().contiguous().clone() for part in kept))


class StatesStore(ABC):
    """States by row; subclasses say where."""

    def __init__(self, format: StatesFormat):
        self.format = format

    @abstractmethod
    def __contains__(self, key: str) -> bool:
        """Whether the row of this key is kept."""

    @abstractmethod
    def read(self, key: str) -> TargetStates:
        """Tapped `[E, T * H]` and final `[M, H]` of one row."""

    @abstractmethod
    def add(self, rows: dict[str, TargetStates]) -> None:
        """Keep these rows, as `StatesFormat.cut` gives them."""

    @abstractmethod
    def room(self) -> tuple[int, str]:
        """Free bytes, and in words where."""

    def batch(self, input_ids, attention_mask, supervised) -> TargetStates | None:
        """States of a right-padded batch `[batch, L]`, zeros where none are kept; None unless all rows are known."""
        lengths = attention_mask.sum(-1).tolist()
        rows = list(zip(input_ids.tolist(), supervised.tolist(), lengths, strict=True))
        keys = [row_key(ids[:length], flags[:length]) for ids, flags, length in rows]
        if not all(key in self for key in keys):
            return None
        batch_size, width = input_ids.shape
        size, dtype = self.format.hidden_size, self.format.torch_dtype
        tapped = torch.zeros(batch_size, width, size * len(self.format.layer_ids), dtype=dtype)
        final = torch.zeros(batch_size, width, size, dtype=dtype)
        for i, key in enumerate(keys):
            kept = self.read(key)
            end = kept.tapped.shape[0]
            tapped[i, :end] = kept.tapped
            final[i, end - kept.final.shape[0] : end] = kept.final
        return TargetStates(tapped.to(input_ids.device), final.to(input_ids.device))

    def require_room(self, needed: int, count: int) -> str:
        """In words what is about to be kept and where.

        Raises:
            ValueError: it does not fit.
        """
        free, place = self.room()
        size = f"the target's states of {count} rows take {needed / GIB:.2f} GiB ({self.format.dtype})"
        if needed > free:
            raise ValueError(
                f"{size} and {place} has {free / GIB:.2f} GiB free; make room, keep them in bfloat16 "
                "(--states_dtype bfloat16), lower --max_length, or train without keeping states."
            )
        return f"{size}; {place} has {free / GIB:.2f} GiB free"


class MemoryStates(StatesStore):
    """States in this process's memory."""

    def __init__(self, format: StatesFormat):
        super().__init__(format)
        self.rows: dict[str, TargetStates] = {}

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def read(self, key: str) -> TargetStates:
        return self.rows[key]

    def add(self, rows: dict[str, TargetStates]) -> None:
        self.rows.update(rows)

    def room(self) -> tuple[int, str]:
        return psutil.virtual_memory().available, "memory"


class DiskStates(StatesStore):
    """States in a directory, which several processes may fill at a time; rows are read through a memory map.

    Args:
        directory: made when the first rows are added.
    Raises:
        ValueError: the directory's states are of another format, or a shard that its index lists is gone.
    """

    def __init__(self, directory: str | Path, format: StatesFormat):
        super().__init__(format)
        self.directory = Path(directory)
        self.shards: dict[str, list[str]] = {}
        self.places: dict[str, str] = {}
        self.opened = functools.lru_cache(maxsize=OPEN_SHARDS)(
            lambda name: safe_open(self.directory / name, framework="pt")
        )
        self.reload()

    def reload(self) -> None:
        """Take over what other processes have added."""
        index = self.directory / INDEX
        if not index.exists():
            return
        found = json.loads(index.read_text(encoding="utf-8"))
        ours = asdict(self.format)
        other = {name: found["format"].get(name) for name in ours if found["format"].get(name) != ours[name]}
        if other:
            expected = {name: ours[name] for name in other}
            raise ValueError(
                f"the states in '{self.directory}' were made for {other}, expected {expected}; "
                "name another directory, or the options they were made with."
            )
        gone = [name for name in found["shards"] if not (self.directory / name).exists()]
        if gone:
            raise ValueError(
                f"'{self.directory}' lists the shard '{gone[0]}' and does not hold it; "
                "put it back, or delete the directory to have it built again."
            )
        self.shards = found["shards"]
        self.places = {key: name for name, keys in self.shards.items() for key in keys}

    def __contains__(self, key: str) -> bool:
        return key in self.places

    def read(self, key: str) -> TargetStates:
        shard = self.opened(self.places[key])
        return TargetStates(shard.get_tensor(f"{key}.tapped"), shard.get_tensor(f"{key}.final"))

    def add(self, rows: dict[str, TargetStates]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / ".lock"):
            self.reload()
            name = f"states-{len(self.shards):05d}.safetensors"
            tensors = {}
            for key, states in rows.items():
                tensors[f"{key}.tapped"], tensors[f"{key}.final"] = states.tapped, states.final
            partial = self.directory / f"{name}.partial"
            save_file(tensors, partial)
            os.replace(partial, self.directory / name)
            self.shards[name] = list(rows)
            self.places |= dict.fromkeys(rows, name)
            partial = self.directory / f"{INDEX}.partial"
            partial.write_text(json.dumps({"format": asdict(self.format), "shards": self.shards}), encoding="utf-8")
            os.replace(partial, self.directory / INDEX)

    def room(self) -> tuple[int, str]:
        place = self.directory.resolve()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free, f"the disk of '{self.directory}'"


def missing_rows(store: StatesStore, rows: Iterable[dict]) -> dict[str, int]:
    """Places of the rows that the store does not know, by key."""
    found: dict[str, int] = {}
    for i, row in enumerate(rows):
        key = row_key(row["input_ids"], row["supervised"])
        if key not in store:
            found.setdefault(key, i)
    return found


def fill(store: StatesStore, target, rows, *, batch_tokens: int = 4096, rank: int = 0, world: int = 1) -> None:
    """Run the target over the rows that the store does not know yet, batches of like length, with a progress bar.

    Args:
        rows: indexable rows with `input_ids` and `supervised`.
        batch_tokens (int): most tokens of a batch, padding included; one row is always taken.
        rank, world: take the `rank`-th of `world` shares, where several processes fill one directory.
    Raises:
        ValueError: the states do not fit; nothing is written then.
    """
    missing = missing_rows(store, rows)
    if not missing:
        return
    needed = sum(store.format.row_bytes(rows[i]["supervised"]) for i in missing.values())
    announcement = store.require_room(needed, len(missing))
    if rank == 0:
        print(announcement, flush=True)
    # Shares go by key: a list of what is missing would differ between processes once the first has written.
    mine = [i for key, i in missing.items() if int(key[:8], 16) % world == rank]
    share = sorted(((i, len(rows[i]["input_ids"])) for i in mine), key=lambda place: place[1])
    pending, size = {}, 0
    with tqdm(total=len(share), desc="target states", unit="row", disable=rank > 0) as bar:
        for numbers in _batches(share, batch_tokens):
            batch = [rows[i] for i in numbers]
            for row, states in zip(batch, _run(store.format, target, batch), strict=True):
                pending[row_key(row["input_ids"], row["supervised"])] = states
                size += store.format.row_bytes(row["supervised"])
            if size >= SHARD_BYTES:
                store.add(pending)
                pending, size = {}, 0
            bar.update(len(batch))
    if pending:
        store.add(pending)


def _batches(places: list[tuple[int, int]], batch_tokens: int) -> Iterator[list[int]]:
    """Row numbers of batches of at most `batch_tokens` padded tokens, or of one row; lengths must rise."""
    batch: list[int] = []
    for i, length in places:
        if batch and (len(batch) + 1) * length > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _run(format: StatesFormat, target, batch: list[dict]) -> list[TargetStates]:
    """What is kept of each row after one target forward over all of them."""
    padded = {name: value.to(target.device) for name, value in BlockCollator(pad_token_id=0)(batch).items()}
    states = target_states(target, format.layer_ids, padded["input_ids"], padded["attention_mask"])
    return [format.cut(states, i, row["supervised"]) for i, row in enumerate(batch)]


def prepare_states(target, layer_ids: list[int], rows, *, directory: str | None, dtype: str, rank: int, world: int):
    """A store that knows all these rows: in `directory`, filled by all processes together, or in memory.

    Args:
        rows: as for `fill`; dtype: as for `StatesFormat.of`.
        rank, world: this process and how many there are; all must call.
    """
    format = StatesFormat.of(target, layer_ids, dtype)
    if directory is None:
        store = MemoryStates(format)
        fill(store, target, rows)
        return store
    store = DiskStates(directory, format)
    fill(store, target, rows, rank=rank, world=world)
    PartialState().wait_for_everyone()
    store.reload()
    return store
