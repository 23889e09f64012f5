"""The code and commands of the README and the pages run, all links resolve, and tables are those of their sources.

Commands in the text of `benchmarks/GPU_TODO.md` are checked too.
"""

import importlib
import io
import json
import re
import shlex
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import command as benchmarks
from benchmarks import timing
from experiments.harness import command as harness
from experiments.harness.recipe import read_recipe
from experiments.llp_table6 import command as llp_table6
from experiments.lora_mnist import command as lora_mnist
from experiments.lora_mnist import report
from experiments.lora_mnist.config import MnistConfig
from subquad import attention
from subquad.cli import main
from subquad.cli.listing import markdown
from subquad.cli.serve import make_parser
from subquad.cli.show import PICTURES
from subquad.data import load_tokenizer
from subquad.evaluation import drawing
from subquad.testing import assert_same_maths
from tests.fuzz.targets import write_llama2c, write_llama2c_tokenizer

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("decoding", "guide", "images", "import", "layer", "limits", "lora", "lra", "probes", "scale", "transformers")
PAGES = ("README.md", *(f"docs/{name}.md" for name in NAMES))
"""Other tests read the other pages: convert, extend, costs, performance, auditing, add-a-mechanism."""
TABLES = ("benchmarks/GPU_TODO.md",)
SAME_SPEED = 1.05
"""Ratio of two speeds, of one run each, up to which pages call them equal."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [code for kind, code in BLOCK.findall(text) if kind == language]


PYTHON = [(page, number) for page in PAGES for number in range(len(blocks(page, "python")))]
COMMANDS = [
    (page, line.partition(" #")[0].strip())
    for page in PAGES
    for block in blocks(page, "console")
    for line in block.splitlines()
    if re.search("subquad |python -m |torchrun ", line)
]
COMMANDS += [
    (page, command)
    for page in TABLES
    for command in re.findall(r"`((?:subquad|python -m) [^`]+)`", (ROOT / page).read_text(encoding="utf-8"))
]


pytestmark = pytest.mark.together

SMALLEST = {
    "ops": "--device cpu --tokens 16 --batch_tokens 16 --heads 2 --channels 16 --latents 4 --segment 8 --repeats 1 "
    "--peers none",
    "layers": "--device cpu --mechanisms llp --tokens 16 --dim 16 --heads 2 --repeats 1",
    "model": "--device cpu --mechanisms llp --tokens 16 --batch_tokens 16 --dim 16 --heads 2 --vocab 16 --layers 1 "
    "--repeats 1 --peers none",
    "decode": "--device cpu --mechanisms llp --contexts 8 --dim 16 --heads 2 --vocab 16 --layers 1 "
    "--batch 1 --repeats 1 --peers none",
    "precision": "--device cpu --mechanisms linear --data texts --contexts 8 --dim 16 --heads 2 --layers 1 --steps 1 "
    "--train_tokens 16 --train_batch 1 --batch 1",
}
"""Sizes of a benchmark that is run to see whether its options are accepted: the last of two flags wins."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the texts and the runs that the pages speak of, all tiny."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_texts").mkdir()
    for number in range(12):
        text = "".join(f"def main(argv):  # line {line} of file {number}\n" for line in range(40))
        (folder / "my_texts" / f"{number}.txt").write_text(text)
    (folder / "another.txt").write_text("another text\n" * 40)
    (folder / "draft.txt").write_text("a draft\n")
    (folder / "book.txt").write_text("a book\n" * 100)
    tiny = {
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2},
        "data": {"path": str(folder / "my_texts"), "vocab_size": 300, "cache": str(folder / "cache")},
        "batch": {"length": 32, "size": 2},
        "schedule": {"warmup": 1},
        "run": {"steps": 2, "eval_every": 2, "eval_windows": 2, "sample_tokens": 5, "device": "cpu"},
    }
    for name in ("tiny.yaml", "run.yaml"):
        (folder / name).write_text(yaml.safe_dump(tiny))
    shutil.copytree(folder / "my_texts", folder / "texts")
    shutil.make_archive(str(folder / "more"), "gztar", folder / "my_texts")
    assert main(["train", "--config", str(folder / "tiny.yaml"), "--run.folder", str(folder / "runs" / "mine")]) == 0
    shutil.copytree(folder / "runs" / "mine", folder / "runs" / "stdlib-llp")
    latents = ["--model.attention", "perceiver_ar", "--model.options.perceiver_ar.latents", "16"]
    tiny_ar = ["--config", str(folder / "tiny.yaml"), *latents, "--run.folder", str(folder / "runs" / "ar")]
    assert main(["train", *tiny_ar]) == 0
    short = "--run.steps 2 --run.eval_windows 2 --schedule.warmup 1 --run.device cpu --model.dim 16"
    images = np.random.default_rng(0).integers(0, 256, (24, 8, 8), dtype=np.uint8)
    labels = np.arange(24) % 3
    np.savez(folder / "images.npz", x_train=images, y_train=labels, x_test=images[:6], y_test=labels[:6])
    tiny_image = f"{short} --image.path {folder / 'images.npz'} --image.test_images 2 --image.samples 2"
    made = f"{short} --classify.examples 40 --classify.held_out 10 --classify.cache {folder / 'cache'}"
    text = f"{short.removesuffix(' --model.dim 16')} --data.path {folder / 'my_texts'} --batch.length 32"
    text += f" --data.cache {folder / 'cache'} --run.sample_tokens 5"
    adapter = f"train {text} --lora.rank 2 --lora.base {folder / 'runs' / 'tiny'}"
    for run, command in {
        "probe-mqar": f"train --recipe probe-mqar {short}",
        "mnist-linear": f"train --recipe mnist-linear {tiny_image}",
        "mnist-full": f"train --recipe mnist-full {tiny_image}",
        "lra-listops-short": f"train --recipe lra-listops-short {made}",
        "tiny": f"train --recipe tiny {text}",
        "lora": adapter,
    }.items():
        assert main([*shlex.split(command), "--run.folder", str(folder / "runs" / run)]) == 0
    for run, copy in (("probe-mqar", "mqar/window"), ("probe-mqar", "mqar/latte"), ("lora", "other")):
        shutil.copytree(folder / "runs" / run, folder / "runs" / copy)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).save_pretrained(folder / "my_llama")
    load_tokenizer("bytes").save(str(folder / "my_llama" / "tokenizer.json"))
    write_llama2c(folder / "stories260K.bin", 300)
    write_llama2c_tokenizer(folder / "tok512.bin")
    for model, out in (("my_llama", "my_llama"), ("stories260K.bin --tokenizer tok512.bin", "stories")):
        name, *tokenizer = model.replace("tok512.bin", str(folder / "tok512.bin")).split()
        assert main(["import", str(folder / name), *tokenizer, "--out", str(folder / "runs" / out)]) == 0
    full = "--model.attention full --run.folder"
    assert main(["train", "--config", str(folder / "tiny.yaml"), *full.split(), str(folder / "runs" / "full")]) == 0
    read = ["--prompt-file", str(folder / "book.txt"), "--max_tokens", "0"]
    state = ["--state-out", str(folder / "book.safetensors")]
    assert main(["generate", str(folder / "runs" / "mine"), *read, *state]) == 0
    return folder


@pytest.fixture
def lone_process(monkeypatch):
    """The environment of torchrun with one process, for code that starts torch.distributed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_python_blocks_run(page, number, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("SUBQUAD_CACHE", str(place / "cache"))
    code = compile(blocks(page, "python")[number], f"{page}, block {number}", "exec")
    exec(code, {"__name__": "__main__"})  # noqa: S102 the pages' own code


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_are_accepted(page, command, place, monkeypatch, capsys):
    """All run, in tiny sizes; a training prints its configuration, a server and an experiment only parse."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("SUBQUAD_CACHE", str(place / "cache"))
    feed, _, command = command.rpartition("| ")
    words = [word for word in shlex.split(command) if not re.match("[A-Z_]+=", word)]
    if words[0] == "torchrun" and "-m" not in words:
        assert f"`{words[-1]}`" in (ROOT / page).read_text(encoding="utf-8"), "the page shows the file's code"
        return
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[:2] == ["python", "-m"]:
        accepts_program(words[2], words[3:], place, monkeypatch, capsys)
        return
    assert words[0] == "subquad"
    if feed:
        monkeypatch.setattr("sys.stdin", io.StringIO((place / shlex.split(feed)[1]).read_text()))
    if words[1] == "train":
        words = [word for word in words if word != "--print_config"] + ["--print_config"]
        with pytest.raises(SystemExit) as exit_info:
            main(words[1:])
        assert exit_info.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["run"]["folder"]
    elif words[1] == "serve":
        make_parser().parse_args(words[2:])
    elif words[1] in ("convert", "extend"):
        with pytest.raises(SystemExit) as exit_info:
            main([*words[1:], "--print_config"])
        assert exit_info.value.code == 0
    elif words[1] in ("import", "export") or words[1:3] == ["lora", "merge"]:
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)  # more than one page writes it
        assert main(words[1:]) == 0
    elif words[1] == "probe":
        shorter = ["--lengths", "96"] if "--task" in words else []  # the text of the run is short
        assert main([*words[1:], *shorter, "--samples", "2"]) == 0
    elif words[1:3] == ["data", "listops"]:
        assert main([*words[1:], "--examples", "40", "--held_out", "10"]) == 0
    elif words[1] == "cost":
        assert main([*words[1:], "--attention", "llp"]) == 0  # all mechanisms take ten seconds
    elif words[1] == "generate" and "--max_tokens 0" not in command and "--images" not in words:
        assert main([*words[1:], "--max_tokens", "8"]) == 0
    elif words[1] == "audit":
        assert main([*words[1:], *["--tokens", "8", "--long", "16", "--contexts", "[4,8]"]]) == 0
    else:
        assert main(words[1:]) == 0


def accepts_program(program, words, place, monkeypatch, capsys):
    """Run a program that needs a clone, in tiny sizes; an experiment is only parsed."""
    if program == "pytest":
        assert (ROOT / words[-1]).is_file()
    elif program == "experiments":
        chosen = harness.make_parser().parse_args(words)
        if chosen.name:
            read_recipe(ROOT / "experiments" / chosen.name).scale(chosen.scale)
    elif program == "experiments.lora_mnist":
        with pytest.raises(SystemExit) as exit_info:
            lora_mnist.main([*words, "--path", str(place / "images.npz"), "--print_config"])
        assert exit_info.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["markdown"] == "lora-mnist.md"
    elif program == "experiments.llp_table6":
        assert llp_table6.main(words) == 0
    else:
        assert program == "benchmarks"
        monkeypatch.setattr(timing, "COPIED", {"cpu": 2**16})
        monkeypatch.setattr(timing, "MULTIPLIED", {"cpu": 32})
        monkeypatch.setattr(drawing, "save", lambda figure, file: file.touch())
        words = [word for word in words if word not in ("--compile", "--graph")]  # a compiler, a GPU
        assert benchmarks.main([*words, *SMALLEST[words[0]].split()]) == 0


def test_the_table_of_mechanisms_is_the_registrys():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = "<!-- mechanisms: written by `subquad list --markdown` -->\n\n", "\n\n<!-- /mechanisms -->"
    shown = text.partition(begin)[2].partition(end)[0]
    assert shown == markdown(), "replace the table in README.md by what `subquad list --markdown` prints"


def read(result: str):
    return json.loads((ROOT / "benchmarks" / "results" / f"{result}.json").read_text(encoding="utf-8"))


def readme() -> str:
    """The README on one line, without its table of mechanisms."""
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_readme_counts_its_mechanisms_and_experiments():
    assert f" {len(attention.names())} attention mechanisms, " in readme()
    names = harness.experiments(harness.HOME)
    numbered = [name for name in names if re.search(r"_(table|figure)\d", name)]
    llp, latte = (sum(name.startswith(paper) for name in numbered) for paper in ("llp", "latte"))
    assert (len(names), len(numbered), llp, latte) == (24, 13, 7, 6)
    assert "The 24 [experiments](experiments/README.md) repeat, at the size of a laptop, 13 numbered" in readme()
    assert "(LLP: seven, Latte: six)" in readme()


def test_the_readmes_speeds_are_the_ranges_of_the_runs():
    runs = [run["found"] for run in read("cpu_ops_runs")]
    ranges = {}
    for tokens in ("1,024", "16,384"):
        for name in ("linear", "latte", "llp"):
            found = [run[f"{name}, forward | T = {tokens}"] for run in runs]
            ranges[name, tokens] = min(found), max(found)
    told = {name: f"{low:.0f} to {high:.0f}" for (name, tokens), (low, high) in ranges.items() if tokens == "16,384"}
    low, high = (f([pair[i] for (_, n), pair in ranges.items() if n == "1,024"]) for i, f in enumerate((min, max)))
    said = f"`linear` is {told['linear']} times, `latte` {told['latte']} times and `llp` {told['llp']} times as fast"
    assert said in readme()
    assert f"at 1,024 tokens {low:.1f} to {high:.1f} times" in readme()


def test_the_four_routes_have_the_figures_of_the_results():
    """The table of the README: what a swap, a conversion and an import cost and bring."""
    steps = {row["tokens"]: row["seconds"] for row in read("cpu_stock_attention")["rows"]}
    times = [f"{steps[tokens]['sdpa'] / steps[tokens]['subquad_llp']:.1f}" for tokens in (1024, 4096, 16384)]
    assert f"{times[0]} times as fast at 1,024 tokens, {times[1]} at 4,096, {times[2]} at 16,384" in readme()
    converted = read("convert")
    perplexity = {name: [stage["perplexity"] for stage in one["stages"]] for name, one in converted.items()}
    original, swapped = perplexity["llp"][:2]
    assert f"perplexity {original:.2f} became {swapped:.2f}. Train on before you use it" in readme()
    last = [values[-1] for values in perplexity.values()]
    assert f"perplexity {original:.2f} became {min(last):.2f} to {max(last):.2f} |" in readme()
    assert f"`llp` {state_after(converted['llp'], 8192)} KiB" in readme()
    assert f"`latte_macchiato` {state_after(converted['latte'], 8192)} KiB" in readme()
    speed = {name: relative_speed(converted[name]) for name in ("llp", "latte")}
    assert [n for n, times in speed["llp"].items() if times > SAME_SPEED] == [4096, 8192]
    assert [n for n, times in speed["latte"].items() if times > 1 / SAME_SPEED] == [8192]
    assert speed["latte"][8192] < SAME_SPEED
    said = "from 4,096 tokens with `llp`; with `latte_macchiato` it is as fast as the original's at 8,192 tokens, "
    said += "slower below"
    assert said in readme()
    assert said in " ".join((ROOT / "docs/convert.md").read_text(encoding="utf-8").split())
    times = {
        (row["form"], row["tokens"]): f"{row['over_transformers']:.1f}"
        for row in read("cpu_decode")["rows"]
        if row["name"] == "full" and row["kind"] == "ours"
    }
    near, far = (" to ".join(times[form, tokens] for form in ("call", "recorded")) for tokens in (4096, 32768))
    assert f"decoding is {near} times as fast after 4,096 tokens, {far} times after 32,768" in readme()


def state_after(conversion, context: int) -> int:
    """KiB of a converted model's state."""
    return round(by_context(conversion, -1)[context]["state_bytes"] / 1024)


def relative_speed(conversion) -> dict[int, float]:
    """Times as fast as the original, by context."""
    before, after = by_context(conversion, 0), by_context(conversion, -1)
    return {n: after[n]["tokens_per_second"] / before[n]["tokens_per_second"] for n in before}


def by_context(conversion, stage: int):
    return {one["context"]: one for one in conversion["stages"][stage]["decoding"]}


def test_the_layers_page_says_how_each_mechanism_learns_the_order(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = (ROOT / "docs/layer.md").read_text(encoding="utf-8")
    make = importlib.import_module("make_lists")
    assert make.pages.rewritten(page, make.BLOCKS) == page, "write it again: make lists"
    rotating, by_itself, not_at_all = make.ways_to_learn_order().values()
    assert sorted(rotating + by_itself + not_at_all) == attention.names()
    on = [name for name in rotating if attention.build(name, dim=16, num_heads=2).config.rope]
    assert on == ["latte_macchiato"]  # as the page says
    x, swapped = (
        torch.randn(1, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        [1, 0, 2, 3, 4, 5],
    )
    for name in by_itself + not_at_all:
        torch.manual_seed(0)
        layer = attention.build(name, dim=16, num_heads=2, causal="causal" in attention.mechanism(name).forms).double()
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.3)
        last, other = (layer(tokens)[0][:, -1] for tokens in (x, x[:, swapped]))
        if name in not_at_all:
            assert_same_maths(last, other)
        else:
            with pytest.raises(AssertionError):
                assert_same_maths(last, other)


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the files and anchors that a page links to, outside of its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = [target.partition("#") for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    return [((page.parent / file).resolve() if file else page, anchor) for file, _, anchor in found]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_every_page_resolves():
    patterns = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "experiments/**/*.md")
    pages = [file for pattern in patterns for file in ROOT.glob(pattern)]
    assert len(pages) > 60
    for page in pages:
        for file, anchor in links(page):
            assert file.exists(), f"{page.relative_to(ROOT)} links to {file}"
            assert not anchor or anchor in anchors(file), f"{page.relative_to(ROOT)} links to {file.name}#{anchor}"


def test_the_mathematics_has_every_mechanism():
    text = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
    assert [name for name in attention.names() if f"**{name}**" not in text] == ["llp_printed"], "a form of llp"


def test_pages_stay_short_and_tell_what_is():
    """Whole tables belong to benchmarks/results and to the experiments' folders; goals to the issues."""
    most = {"performance": 15_000, "findings": 18_000, "gpu": 8_000, "mathematics": 12_000, "engines": 12_000}
    most["precision"] = 8_000
    assert [name for name, size in most.items() if (ROOT / "docs" / f"{name}.md").stat().st_size > size] == []
    lines = {script.stem: len(script.read_text("utf-8").splitlines()) for script in (ROOT / "docs").glob("*.py")}
    site = sum(lines.pop(name) for name in ("conf", "make_site"))
    assert sum(lines.values()) <= 700
    assert site <= 220
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"\b(aims?|aimed|missed|met)\b", page.read_text(encoding="utf-8")), page.name


def test_the_index_links_every_page_and_decision():
    index, decisions = ROOT / "docs" / "README.md", ROOT / "docs" / "decisions" / "README.md"
    linked = {file for page in (index, decisions) for file, _ in links(page)}
    assert linked >= {file.resolve() for file in (ROOT / "docs").rglob("*.md")} - {index}


@pytest.mark.slow
def test_the_tables_of_scale_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make = importlib.import_module("make_scale")
    page, found = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), make.pages.result("cpu_scale")
    assert make.pages.rewritten(page, make.blocks(found)) == page, "write them again: python docs/make_scale.py"


def test_the_tables_of_compiled_kernels_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make, page = importlib.import_module("make_gpu"), (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert make.pages.rewritten(page, make.BLOCKS) == page, "write them again: python docs/make_gpu.py"
    assert (make.pages.RESULTS / "compiled.md").read_text(encoding="utf-8") == make.compiled()


def test_the_tables_of_lora_on_mnist_are_those_of_the_results(tmp_path, capsys):
    values = json.loads((ROOT / "benchmarks/results/lora_mnist.json").read_text(encoding="utf-8"))
    report.show(values, MnistConfig.from_dict(values["config"]), str(tmp_path / "tables.md"))
    page = (ROOT / "experiments/lora_mnist/tables.md").read_text(encoding="utf-8")
    assert page.endswith((tmp_path / "tables.md").read_text(encoding="utf-8"))


def test_the_picture_can_be_drawn_again_and_shows_every_mechanism():
    make_parser, draw = PICTURES["weights"]
    figure = draw(make_parser().parse_args([]))
    titles = [axis.get_title().removesuffix(" *") for axis in figure.axes]  # a star: rows do not sum to one
    assert titles[: len(attention.names())] == attention.names()
