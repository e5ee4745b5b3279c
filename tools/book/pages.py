"""Pages that are made from data: the list of chapters, and the bug gallery."""
import re
from pathlib import Path
from typing import Any

import yaml

from tools.book.chapter import LANGUAGES, Chapter, ChapterError

HOMES = {
    "cann-recipes-infer": None, "NeMo Automodel": "NVIDIA-NeMo/Automodel", "ik_llama.cpp": "ikawrakow/ik_llama.cpp",
    "llama-benchy": None, "LMCache-Ascend": "LMCache/LMCache-Ascend", "lmdeploy": "InternLM/lmdeploy",
    "mlx-lm": "ml-explore/mlx-lm", "ms-swift": "modelscope/ms-swift", "nano-vllm": "GeeeekExplorer/nano-vllm",
    "sglang": "sgl-project/sglang", "sglang-jax": "sgl-project/sglang-jax", "transformers": "huggingface/transformers",
    "vllm": "vllm-project/vllm", "vllm-ascend": "vllm-project/vllm-ascend",
}
WORDS: dict[str, Any] = {
    "en": {
        "chapters": "Chapters", "gallery": "Bug gallery", "rule": "What prevents it", "chapter": "Chapter",
        "seen": "Seen in", "later": "a later one", "head": "| chapter | minutes | bugs |",
        "chapters_intro": "Every chapter is executed whenever this site is built. Read them in order, or open one as "
                          "a notebook: [how to run them](../start.md#chapters).",
        "gallery_intro": "Public defects of serving engines, retold: what one sees, and the rule that prevents it. "
                         "They come from serving on Ascend NPUs and from close relatives elsewhere. Many leave the "
                         "text right and show only as low acceptance, or only at a full batch: that is why they live "
                         "long. A chapter that covers a bug makes it happen, and then makes it impossible.",
    },
    "zh": {
        "chapters": "章节", "gallery": "缺陷图鉴", "rule": "怎样防住", "chapter": "章节", "seen": "出处",
        "later": "后续章节", "head": "| 章节 | 分钟 | 缺陷 |",
        "chapters_intro": "每次构建本站时，每一章都会执行。可以按顺序读，也可以作为笔记本打开："
                          "[怎样运行](../start.md#chapters)。",
        "gallery_intro": "这里重述推理引擎的公开缺陷：看到的是什么，哪条规则能防住它。"
                         "它们来自昇腾 NPU 上的服务，以及其他平台上的同类引擎。"
                         "许多缺陷不影响文本，只表现为接受率低，或者只在 batch 满时出现，所以才长期没被发现。"
                         "讲到某个缺陷的章节会先让它发生，再让它不可能发生。",
    },
}


def chapter_list(chapters: list[Chapter], language: str) -> str:
    words = WORDS[language]
    rows = [f"| [{chapter.header['title'][language]}]({chapter.name}.md) | {chapter.header['minutes']} | "
            + ", ".join(f"[{bug}](../bugs.md#{bug.lower()})" for bug in chapter.header["bugs"]) + " |"
            for chapter in chapters]
    table = "\n".join([words["head"], "|---|---|---|", *rows])
    return f"# {words['chapters']}\n\n{words['chapters_intro']}\n\n{table}\n"


def gallery(data: Path, chapters: list[Chapter], language: str) -> str:
    """The bug gallery from docs/bugs.yml.

    Raises:
        ChapterError: an entry lacks a language, or a chapter names a bug that is not there.
    """
    words, parts = WORDS[language], []
    classes = yaml.safe_load(data.read_text(encoding="utf-8"))
    bugs = [bug for group in classes for bug in group["bugs"]]
    if unknown := {bug for chapter in chapters for bug in chapter.header["bugs"]} - {bug["id"] for bug in bugs}:
        raise ChapterError(f"{data.name} does not have {', '.join(sorted(unknown))}")
    for group in classes:
        parts.append(f"## {group['class'][language]}")
        for bug in group["bugs"]:
            if missing := [name for name in LANGUAGES if not all(bug.get(name, {}).get(k) for k in ("bug", "rule"))]:
                raise ChapterError(f"{data.name}: {bug['id']} lacks {', '.join(missing)}")
            covered = [f"[{chapter.header['title'][language]}](chapters/{chapter.name}.md)"
                       for chapter in chapters if bug["id"] in chapter.header["bugs"]]
            parts.append(
                f"### {bug['id']} {{ #{bug['id'].lower()} }}\n\n{bug[language]['bug']}\n\n"
                f"- **{words['rule']}**: {bug[language]['rule']}\n"
                f"- **{words['chapter']}**: {', '.join(covered) or words['later']}\n"
                f"- **{words['seen']}**: {', '.join(link(where) for where in bug['seen'])}")
    body = "\n\n".join(parts)
    return f"# {words['gallery']}\n\n{words['gallery_intro']}\n\n{body}\n"


def link(where: str) -> str:
    """'sglang PR #1' as a link to it, where the project's home is known."""
    match = re.fullmatch(r"(.+) (PR|issue) #(\d+)", where)
    home = HOMES.get(match[1]) if match else None
    if match is None or home is None:
        return where
    return f"[{where}](https://github.com/{home}/{'pull' if match[2] == 'PR' else 'issues'}/{match[3]})"
