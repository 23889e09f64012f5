"""Prepare a text corpus from a `DataConfig`: tokenize it once into a folder named by a hash of all its inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import tokenizers
from tokenizers import Tokenizer

from subquad.config import digest
from subquad.data.config import DataConfig
from subquad.data.files import Progress, cache_folder, fill_once, silent, write_json
from subquad.data.shards import FORMAT_VERSION, TokenShard
from subquad.data.sources import READING_VERSION, Source, cut, hold_out, no_text, open_source
from subquad.data.special_tokens import CONFIG, tokenizer_config
from subquad.data.token_set import TokenSet, held_out_names, is_token_set
from subquad.data.token_writer import encoded, shard_writer
from subquad.data.tokenizers import Encoder, load_tokenizer, pieces, tokenizer_hash
from subquad.data.vocabularies import TRAINED, make_tokenizer
from subquad.disk import remove, sha256_of
from subquad.parsing import check_keys, read_json

logger = logging.getLogger(__name__)
PLAIN = ("tokenizer.json", "held_out.txt", "names.json")
"""Files of a corpus that carry no checksum of their own."""
FILES, NAMED = "data.files", 10_000
"""The setting of a checkpoint that holds the hashes of the text's files by name, and its greatest number of files."""


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: its tokenizer, and a shard or set of shards for each part.

    `fingerprint` is a hash of the names and contents of the text. `train_files` and `held_out_files` name the documents
    of each part (empty for the rows of a dataset); a single document is split and named in both. `hashes` are those of
    the files or shards, by name; if a name is in both parts, the hash is that of the training part.
    """

    folder: Path
    tokenizer: Tokenizer
    train: TokenShard | TokenSet
    held_out: TokenShard | TokenSet
    fingerprint: str
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    hashes: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all documents, sorted."""
        return tuple(sorted({*self.train_files, *self.held_out_files}))

    @property
    def identity(self) -> dict[str, Any]:
        """The digest that a resumed run must have, and hashes of up to `NAMED` files, to name those that changed."""
        files = {FILES: dict(self.hashes)} if 0 < len(self.hashes) <= NAMED else {}
        return {"data": digest([self.fingerprint, self.train_files, len(self.train)]), **files}

    def held_out_text(self) -> bytes:
        """Return the held-out documents joined, `held_out.text_bytes` bytes; `ValueError` for a set, which has none."""
        if isinstance(self.held_out, TokenSet):
            raise ValueError(f"{self.folder} holds token shards without their text; decode them with the tokenizer")
        return (self.folder / "held_out.txt").read_bytes()

    def train_text(self, most: int) -> bytes:
        """Return the end of the training text, at most about `most` bytes; `ValueError` for a set, which has none."""
        if isinstance(self.train, TokenSet):
            raise ValueError(f"{self.folder} holds token shards without their text; decode them with the tokenizer")
        tokens = max(1, round(most * len(self.train) / max(1, self.train.text_bytes)))
        text: str = self.tokenizer.decode(self.train.tokens[-tokens:].tolist())
        return text.encode()


def prepare(config: DataConfig, *, progress: Progress | None = None) -> Corpus:
    """Read, split, tokenize and store the corpus that `config` describes, or open it if it is stored already.

    The stored corpus is found by a hash of the configuration and of all file contents. It is checked when opened, and
    rebuilt with a warning if it is damaged. Several processes may prepare the same corpus at once.

    Raises `FileNotFoundError` or `ImportError` if the text is missing, and `ValueError` if it is not text, is too short
    or changes while it is read, or if the tokenizer is unknown. For a folder of token shards see `open_token_corpus`.
    """
    if is_token_set(config.path):
        return open_token_corpus(config)
    if config.held_out_shards is not None:
        raise ValueError(f"held_out_shards is only for a folder of token shards, and {config.path!r} is not one")
    fixed = None if config.tokenizer in TRAINED else load_tokenizer(config.tokenizer, TRAINED)
    paths = [path for path in (config.path, config.held_out_path) if path is not None]
    sources = [open_source(path, skip_bad_files=config.skip_bad_files) for path in paths]
    contents = [source.fingerprint() for source in sources]
    recipe = config.tokenizer if config.tokenizer == "characters" else f"{config.tokenizer} {config.vocab_size}"
    key = digest(
        {
            "contents": contents,
            "held_out": [config.held_out, config.split_seed] if config.held_out_path is None else "apart",
            "tokenizer": recipe if fixed is None else tokenizer_hash(fixed),
            "skip_bad_files": config.skip_bad_files,
            "versions": [FORMAT_VERSION, READING_VERSION, tokenizers.__version__],
        }
    )
    folder = cache_folder(config.cache) / f"corpus-{key}"

    def fill(temporary: Path) -> None:
        _build(temporary, config, fixed, sources, progress or silent)
        sums = {name: sha256_of(temporary / name) for name in (*PLAIN, CONFIG)}
        write_json(temporary / "manifest.json", {"version": FORMAT_VERSION, "contents": contents, "sha256": sums})
        for source, before in zip(sources, contents, strict=True):
            _check_unchanged(source, before)

    fill_once(folder, lambda: _open(folder), fill)
    return replace(_open(folder), hashes={**sources[-1].hashes, **sources[0].hashes})


def prepare_shard(
    path: str,
    tokenizer: Tokenizer,
    *,
    skip_bad_files: bool = False,
    cache: str | None = None,
    progress: Progress | None = None,
) -> TokenShard:
    """Return all text at `path`, in a form of `DataConfig.path`, as one shard; caches and raises as `prepare`."""
    source = open_source(path, skip_bad_files=skip_bad_files)
    before, made_by = source.fingerprint(), tokenizer_hash(tokenizer)
    key = digest([before, made_by, skip_bad_files, FORMAT_VERSION, READING_VERSION, tokenizers.__version__])
    folder = cache_folder(cache) / f"shard-{key}"
    file = folder / "all.tokens"

    def fill(temporary: Path) -> None:
        with (temporary / "text").open("w+b") as stream:
            spool = _Spool(stream, progress or silent)
            spool.read(source)
            spool.write_shard(temporary / file.name, spool.parts, tokenizer)
        remove(temporary / "text")
        _check_unchanged(source, before)

    fill_once(folder, lambda: TokenShard(file, tokenizer_hash=made_by), fill)
    return TokenShard(file, tokenizer_hash=made_by)


def open_token_corpus(config: DataConfig) -> Corpus:
    """Open the folder of token shards at `config.path`, and hold out some of them or all shards of `held_out_path`.

    Reads only the index. Raises `ValueError` for a damaged index, for names that it lacks, for a part without shards,
    and for shards made with another tokenizer than `config` or the other folder has.
    """
    folder = Path(config.path).expanduser()
    whole = TokenSet(folder, bad_shards=config.bad_shards)
    tokenizer = load_tokenizer(folder)
    if tokenizer_hash(tokenizer) != whole.tokenizer_hash:
        raise ValueError(f"{folder} was made with another tokenizer than its tokenizer.json")
    asked = config.tokenizer
    if asked not in TRAINED and tokenizer_hash(load_tokenizer(asked)) != whole.tokenizer_hash:
        raise ValueError(f"{folder} was made with another tokenizer than tokenizer={asked!r}; leave that out")
    names = [entry.name for entry in whole.entries]
    if config.held_out_path is not None:
        held_out = _other(config, whole)
        train = whole
    else:
        chosen = config.held_out_shards
        apart = held_out_names(whole.entries, config.held_out) if chosen is None else chosen
        rest = [name for name in names if name not in set(apart)]
        if not rest or not apart:
            raise ValueError(
                f"at least one of the shards {', '.join(names)} in {folder} must be held out and one be left, got "
                f"held_out_shards={chosen}; make smaller shards, or set held_out_path to another folder"
            )
        held_out = TokenSet(folder, apart)
        train = TokenSet(folder, rest, bad_shards=config.bad_shards)
    return Corpus(
        folder=folder,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        fingerprint=digest([train.fingerprint, held_out.fingerprint]),
        train_files=tuple(entry.name for entry in train.entries),
        held_out_files=tuple(entry.name for entry in held_out.entries),
        hashes={entry.name: entry.sha256 for entry in (*held_out.entries, *train.entries)},
    )


def _other(config: DataConfig, whole: TokenSet) -> TokenSet:
    """Open the shards at `held_out_path`."""
    assert config.held_out_path is not None
    if config.held_out_shards is not None:
        raise ValueError("held_out_path and held_out_shards both name a held-out part: leave one out")
    if not is_token_set(config.held_out_path):
        raise ValueError(f"held_out_path must be a folder of token shards, like path, got {config.held_out_path!r}")
    held_out = TokenSet(Path(config.held_out_path).expanduser())
    if held_out.tokenizer_hash != whole.tokenizer_hash:
        raise ValueError(f"{held_out.path} was made with another tokenizer than {whole.path}")
    return held_out


def _build(
    folder: Path, config: DataConfig, tokenizer: Tokenizer | None, sources: list[Source], progress: Progress
) -> None:
    """Write the shards, the tokenizer and the held-out text into `folder`."""
    with (folder / "text").open("w+b") as scratch:
        spool = _Spool(scratch, progress)
        for source in sources:
            counted = len(spool.parts)
            spool.read(source)
        if len(sources) == 2:
            train, held_out = spool.parts[:counted], spool.parts[counted:]
        else:
            train, held_out = _split(spool, config)
        if tokenizer is None:
            progress("training the tokenizer", 0, 1)
            read = train if config.tokenizer != "characters" else [*train, *held_out]
            texts = (piece.decode() for part in read for piece in pieces(spool[part]))
            tokenizer = make_tokenizer(config.tokenizer, texts, config.vocab_size)
            progress("training the tokenizer", 1, 1)
            if config.tokenizer != "characters" and (size := tokenizer.get_vocab_size()) < config.vocab_size:
                logger.warning("the text yields a vocabulary of %d tokens only, not %d", size, config.vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        write_json(folder / CONFIG, tokenizer_config(tokenizer))
        spool.write_shard(folder / "train.tokens", train, tokenizer)
        spool.write_shard(folder / "held_out.tokens", held_out, tokenizer)
        with (folder / "held_out.txt").open("wb") as stream:
            stream.writelines(spool[part] for part in held_out)
    remove(folder / "text")
    names = {
        side: list(dict.fromkeys(part.name for part in parts if part.name))  # rows share their file's
        for side, parts in (("train", train), ("held_out", held_out))
    }
    write_json(folder / "names.json", names)


class _Part(NamedTuple):
    """A document or part of one: its file's name (empty for a dataset's row) and its range of bytes in the spool."""

    name: str
    start: int
    end: int


class _Spool:
    """A scratch file of all documents, read and checked once; `parts` and `keys` hold an entry for each, in order."""

    def __init__(self, stream: BinaryIO, progress: Progress) -> None:
        self.stream, self.progress = stream, progress
        self.parts: list[_Part] = []
        self.keys: list[bytes] = []

    def __getitem__(self, part: _Part) -> bytes:
        self.stream.seek(part.start)
        return self.stream.read(part.end - part.start)

    def read(self, source: Source) -> None:
        """Append all documents of `source`; raise `ValueError` if it has none."""
        before, end = len(self.parts), self.stream.seek(0, 2)
        for number, document in enumerate(source.documents(), 1):
            start, end = end, end + self.stream.write(document.text)
            self.parts.append(_Part(document.name, start, end))
            self.keys.append(document.key)
            self.progress("reading", number, max(number, len(source.names)))
        if len(self.parts) == before:
            raise ValueError(no_text(repr(source.asked)))

    def write_shard(self, path: Path, parts: list[_Part], tokenizer: Tokenizer) -> None:
        """Write the tokens of `parts` as a shard, documents divided by the tokenizer's separator if it has one."""
        encoder, total = Encoder(tokenizer), sum(part.end - part.start for part in parts)
        with shard_writer(path, tokenizer) as writer:
            for number, ids, size in encoded(encoder, (self[part] for part in parts)):
                writer.add(ids)
                if size is None:
                    continue
                if number + 1 < len(parts):
                    writer.add(encoder.separator)
                writer.end_document(*size)
                self.progress("encoding", writer.text_bytes, total)


def _split(spool: _Spool, config: DataConfig) -> tuple[list[_Part], list[_Part]]:
    """Return the training and the held-out documents; split a single document in two."""
    if len(spool.parts) == 1:
        (whole,) = spool.parts
        middle = whole.start + cut(spool[whole], config.held_out)
        return [whole._replace(end=middle)], [whole._replace(start=middle)]
    sides: tuple[list[_Part], list[_Part]] = ([], [])
    for part, out in zip(spool.parts, hold_out(spool.keys, config.held_out, config.split_seed), strict=True):
        sides[out].append(part)
    return sides


def _open(folder: Path) -> Corpus:
    manifest = read_json(folder / "manifest.json")
    kinds = {"version": int, "contents": list, "sha256": dict}
    check_keys(manifest, kinds, str(folder / "manifest.json"))
    if (version := manifest["version"]) != FORMAT_VERSION:
        raise ValueError(f"{folder} has corpus format version {version}, this release reads version {FORMAT_VERSION}")
    earlier = CONFIG not in manifest["sha256"]  # a release that kept no checksum of it
    for name in PLAIN if earlier else (*PLAIN, CONFIG):
        if sha256_of(folder / name) != manifest["sha256"].get(name):
            raise ValueError(f"{folder / name} is damaged: its checksum is wrong")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    made_by = tokenizer_hash(tokenizer)
    names = read_json(folder / "names.json")
    check_keys(names, {"train": list, "held_out": list}, str(folder / "names.json"))
    contents = manifest["contents"]
    if not contents or not all(isinstance(word, str) for word in [*contents, *names["train"], *names["held_out"]]):
        raise ValueError(f"{folder} is damaged: contents and names must be strings, with at least one in contents")
    return Corpus(
        folder=folder,
        tokenizer=tokenizer,
        train=TokenShard(folder / "train.tokens", tokenizer_hash=made_by),
        held_out=TokenShard(folder / "held_out.tokens", tokenizer_hash=made_by),
        fingerprint=contents[0] if len(contents) == 1 else digest(contents),
        train_files=tuple(names["train"]),
        held_out_files=tuple(names["held_out"]),
    )


def _check_unchanged(source: Source, before: str) -> None:
    if source.fingerprint() != before:
        raise ValueError("the text changed while it was read: prepare it again")
