"""``python -m trueup.models.training``: make the nano checkpoint or train it further, write its card, measure it.

The same three for its EAGLE-3 head, and for the indexers that make it sparse.
"""
import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from trueup.models.config import ModelConfig
from trueup.models.delta import all_tensors, write_delta
from trueup.models.eagle3_config import Eagle3Config
from trueup.models.stored import read
from trueup.models.training import eagle, eagle_report, eagle_twin, indexer, indexer_report, report, train, twin
from trueup.models.training.bpe import train_bpe
from trueup.models.training.corpus import Corpus, read_corpus
from trueup.models.training.export import export, load_state, rounded_for_storage


def encode(tokenizer: Tokenizer, texts: dict[str, str]) -> torch.Tensor:
    """One stream of ids, int32 [tokens]; <|endoftext|> before each file."""
    ids = [i for e in tokenizer.encode_batch(list(texts.values())) for i in (0, *e.ids)]
    return torch.tensor(ids, dtype=torch.int32)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor() or platform.machine()


def machine(args: argparse.Namespace) -> dict[str, str]:
    return {"cpu": cpu_name(), "date": date.today().isoformat(), "torch": torch.__version__,
            "python": platform.python_version(), "threads": args.note}


def run_train(args: argparse.Namespace) -> None:
    """Tokenizer first (unless --further), then training; ``card`` writes what it made into --model."""
    config, corpus, file = ModelConfig.from_folder(args.model), read_corpus(), args.out / "tokenizer.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.further:
        file = args.model / "tokenizer.json"
    elif not file.exists():
        train_bpe(corpus.train.values(), config.vocab_size).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    stream, held_out = encode(tokenizer, corpus.train), encode(tokenizer, corpus.held_out)
    print(f"corpus {corpus.sha256[:16]}: {len(corpus.train)} files, {len(stream):,} tokens to train on; "
          f"{len(corpus.held_out)} files, {len(held_out):,} tokens held out", flush=True)
    params = twin.init_params(config, args.seed)
    if args.further:
        params |= {n: v.float() for n, v in load_file(args.model / "model.safetensors").items()}
    train.train(params, config, stream, held_out, args.out, minutes=args.minutes,
                seed=args.seed, dtype=getattr(torch, args.dtype), fresh=not args.further)


def run_card(args: argparse.Namespace) -> None:
    """Export the finished run into --model, measure it, and write README.md there."""
    config, corpus = ModelConfig.from_folder(args.model), read_corpus()
    params, state = load_state(args.out / "state.pt")
    export(params, args.model)
    for name in ("tokenizer.json", "loss.png"):
        if (args.out / name).exists():
            (args.model / name).write_bytes((args.out / name).read_bytes())
    stream, held_out, plain = encoded(args.model, corpus)
    figures = report.measure(params, rounded_for_storage(params), config, stream, held_out, plain)
    sizes = (sum(v.numel() for v in params.values()), len(stream), len(held_out))
    text = report.card(figures, state, config, corpus, sizes, machine(args))
    (args.model / "README.md").write_text(text, encoding="utf-8")
    print(text)


def run_measure(args: argparse.Namespace) -> None:
    """Print the card's figures for the weights that lie in --model, in which nothing is written."""
    weights, config = load_model(args.model)
    figures = report.measure(weights, rounded_for_storage(weights), config, *encoded(args.model, read_corpus()))
    print(json.dumps(figures, indent=1))


def run_eagle(args: argparse.Namespace) -> None:
    """Train the EAGLE-3 head that --head/config.json describes, on the frozen weights in --model."""
    target, config = load_model(args.model)
    head = Eagle3Config.from_folder(args.head, config)
    stream, held_out, _ = encoded(args.model, read_corpus())
    params = eagle_twin.init_params(head, target, eagle_twin.draft_vocabulary(stream, head), args.seed)
    eagle.train_head(params, head, target, config, stream, held_out, args.out, minutes=args.minutes,
                     seed=args.seed, dtype=getattr(torch, args.dtype))


def run_eagle_card(args: argparse.Namespace) -> None:
    """Export the finished run into --head, measure what lies there, and write README.md beside it."""
    params, state = load_state(args.out / "state.pt")
    export(params, args.head)
    train.plot_losses(state["log"], args.head / "loss.png")
    figures, head, config = measured_head(args)
    raw = json.loads((args.head / "config.json").read_text(encoding="utf-8"))
    about = machine(args) | {
        "ids": raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        "name": args.head.name, "target": args.model.name, "sha256": read_corpus().sha256, "seed": args.seed,
        "parameters": sum(v.numel() for v in params.values() if v.is_floating_point()),
        "megabytes": (args.head / "model.safetensors").stat().st_size / 1e6,
    }
    text = eagle_report.card(figures, state, head, config, about)
    (args.head / "README.md").write_text(text, encoding="utf-8")
    print(text)


def run_eagle_measure(args: argparse.Namespace) -> None:
    """Print the card's figures for the head in --head, in which nothing is written."""
    print(json.dumps(measured_head(args)[0], indent=1))


def run_indexer(args: argparse.Namespace) -> None:
    """Train the indexers that --sparse/config.json describes, and a little of the dense weights in --model."""
    base, _ = load_model(args.model)
    config = ModelConfig.from_folder(args.sparse)
    stream, held_out, _ = encoded(args.model, read_corpus())
    params = indexer.init_params(config, base, args.seed)
    indexer.train_indexer(params, base, config, stream, held_out, args.out, minutes=args.minutes,
                          seed=args.seed, dtype=getattr(torch, args.dtype))


def run_indexer_card(args: argparse.Namespace) -> None:
    """Export the finished run into --sparse, measure what lies there, and write README.md beside it."""
    params, state = load_state(args.out / "state.pt")
    write_delta(rounded_for_storage(params), args.model, args.sparse)
    indexer.plot_log(state["log"], args.sparse / "loss.png")
    figures, config = measured_indexer(args)
    indexer_report.plot_recall(figures["curves"], config, args.sparse / "recall.png")
    ours, tuned = indexer.learned(params)
    about = machine(args) | {
        "name": args.sparse.name, "target": args.model.name, "sha256": read_corpus().sha256, "seed": args.seed,
        "indexer_parameters": sum(params[n].numel() for n in ours),
        "tuned_parameters": sum(params[n].numel() for n in tuned), "warm_up": indexer.WARM_UP,
        "default_minutes": SUBJECTS["indexer"][1],
        "megabytes": (args.sparse / "model.safetensors").stat().st_size / 1e6,
    }
    text = indexer_report.card(figures, state, config, about)
    (args.sparse / "README.md").write_text(text, encoding="utf-8")
    print(text)


def run_indexer_measure(args: argparse.Namespace) -> None:
    """Print the card's figures for the model in --sparse, in which nothing is written."""
    print(json.dumps(measured_indexer(args)[0], indent=1))


def measured_indexer(args: argparse.Namespace) -> tuple[dict, ModelConfig]:
    base, _ = load_model(args.model)
    params, config = load_model(args.sparse)
    return indexer_report.measure(params, base, config, encoded(args.model, read_corpus())[1]), config


def measured_head(args: argparse.Namespace) -> tuple[dict, Eagle3Config, ModelConfig]:
    target, config = load_model(args.model)
    head, params = Eagle3Config.from_folder(args.head, config), eagle_twin.load_head(args.head)
    held_out = encoded(args.model, read_corpus())[1]
    return eagle_report.measure(params, head, target, config, held_out), head, config


def load_model(folder: Path) -> tuple[twin.Params, ModelConfig]:
    return {n: v.float() for n, v in read(all_tensors(folder))}, ModelConfig.from_folder(folder)


def encoded(model: Path, corpus: Corpus) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The training part, the held-out part, and the latter without tests, in the model's own ids."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    parts = (corpus.train, corpus.held_out, report.without_tests(corpus.held_out))
    train_ids, held_out, plain = (encode(tokenizer, part) for part in parts)
    return train_ids, held_out, plain


COMMANDS = {"train": run_train, "card": run_card, "measure": run_measure, "eagle": run_eagle,
            "eagle-card": run_eagle_card, "eagle-measure": run_eagle_measure, "indexer": run_indexer,
            "indexer-card": run_indexer_card, "indexer-measure": run_indexer_measure}


# What can be trained: its working folder below build/, and minutes.
SUBJECTS = {"train": ("nano", 130.0), "eagle": ("eagle", 70.0), "indexer": ("indexer", 18.0)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trueup.models.training", description=__doc__)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("out", type=Path, nargs="?", help="working folder; a run that was stopped resumes from it "
                                                          "(default: build/nano, build/eagle or build/indexer)")
    parser.add_argument("--model", type=Path, required=True,
                        help="checkpoint folder with config.json; card writes into it")
    parser.add_argument("--head", type=Path, help="folder of the EAGLE-3 head, with config.json; eagle-card writes "
                                                  "into it (default: beside --model, its name with -eagle3)")
    parser.add_argument("--sparse", type=Path, help="folder of the sparse model, with config.json; indexer-card writes "
                                                    "into it (default: glm-5-nano beside --model)")
    parser.add_argument("--further", action="store_true", help="start from the folder's weights, not from scratch")
    parser.add_argument("--minutes", type=float,
                        help="training time, evaluation apart (default: 130; 70 for the head, 18 for the indexer)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                        help="compute dtype; bfloat16 is several times as fast on a CPU with AVX512-BF16 or AMX, "
                             "slower elsewhere")
    parser.add_argument("--note", default="fp32", help="how the training was run, for the card")
    parser.add_argument("--seed", type=int, default=47)
    args = parser.parse_args(argv)
    subject = args.what.partition("-")[0]
    folder, minutes = SUBJECTS.get(subject, SUBJECTS["train"])
    args.out = args.out or Path("build") / folder
    args.minutes = minutes if args.minutes is None else args.minutes
    args.sparse = args.sparse or args.model.with_name("glm-5-nano")
    args.head = args.head or args.model.with_name(args.model.name + "-eagle3")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    try:
        COMMANDS[args.what](args)
    except ValueError as error:
        print(f"training: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
