# ---
# title:
#   en: "11. Lossless"
#   zh: "11. 无损"
# outcome:
#   en: the reason why drafting cannot change the text, and a test that notices when an engine's drafting does
#   zh: 明白草稿为什么改变不了文本，并有一项测试，引擎的投机解码一旦改变了文本就能发现
# minutes: 15
# prerequisites:
#   en: "[chapter 9](ch09_mtp.md) (drafts and verification); a little probability"
#   zh: "[第 9 章](ch09_mtp.md)（草稿与验证）；一点概率知识"
# bugs: [SB-31, SB-32]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** In speculative decoding a *drafter* proposes a few tokens, and the *target*, the model whose text you
# want, checks all of them in one forward. However bad the proposals are, the text stays the target's own. In greedy
# decoding it is the same, token for token. In sampling it has the same distribution. This chapter says why, checks it
# exactly, and runs the mistakes that have broken it in real engines.
#
# Here the same prompts run without a drafter, with the nano model's MTP layer as drafter, and with one that proposes
# token 5 whatever the text is.

# %% [markdown] tags=["zh"] pair="e20a2e-305c3c"
# **要点。** 投机解码里，*草稿器*（drafter）先提出几个词元，*目标模型*，也就是真正要用的那个模型，再用一次前向把它们全部检查一遍。
# 草稿再差，得到的文本仍然是目标模型自己的：贪心解码时逐词元相同，采样时分布相同。
# 本章讲为什么如此，精确地验证它，并把真实引擎里出现过的几种错误逐一跑出来。
#
# 先让同样的提示词跑三遍：不用草稿器；用 nano 模型的 MTP 层作草稿器；用一个不管什么文本都提词元 5 的草稿器。

# %%
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedDrafter
from trueup.models import LLM
from trueup.models.drafters import make_drafter

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
prompts = ["class Stack:\n    def __init__(self", "import os\nimport sys\n\ndef main(",
           "for name in sorted("]
params = SamplingParams(max_tokens=24, ignore_eos=True)

mtp = make_drafter("mtp", llm.model, draft_tokens=3)
fives = ScriptedDrafter(lambda text, count: [5] * count, (3,), 3, llm.model.vocab_size)
texts, kept = {}, {}
for name, drafter in {"none": None, "MTP": mtp, "fives": fives}.items():
    run = LLM(llm.model, llm.tokenizer, llm.name, drafter=drafter)
    texts[name] = [completion.token_ids for completion in run.generate(prompts, params)]
    kept[name] = run.acceptance.rate

print(f"drafts kept: MTP {kept['MTP']:.2f}, fives {kept['fives']:.2f}")
assert texts["none"] == texts["MTP"] == texts["fives"]
assert kept["MTP"] > 0.4 and kept["fives"] < 0.05

# %% [markdown] tags=["en"]
# ## Greedy: compare ids
#
# For k drafts the target runs W = k + 1 rows of a request: the *pending token*, which belongs to the text already but
# has no cache row yet, and the drafts behind it. The logits of a row, `[W, V]` for all of them, say what follows that
# row's token. So a draft is right if it is the argmax of the row before it. Keep drafts from the front until one is not.
# The target's own token takes its place, and the drafts behind it are dropped: their rows were computed on a text that
# will never be. If all k are kept, the last row's token comes on top, the *bonus token*. A round yields 1 to k + 1
# tokens.

# %% [markdown] tags=["zh"] pair="8628c3-d07842"
# ## 贪心：逐个比较 id
#
# 有 k 个草稿时，目标模型为一个请求计算 W = k + 1 行：先是*待定词元*，它已经属于文本，但还没有缓存行；后面跟着各个草稿。
# 每一行的 logits（合起来是 `[W, V]`）说的是：这一行的词元后面该接什么。所以草稿对不对，看它是不是前一行的 argmax。
# 从头开始保留，直到出现第一个不对的草稿。它的位置换成目标模型自己的词元，再往后的草稿全部丢弃：
# 它们那几行是在一段不会出现的文本上算出来的。如果 k 个草稿全部保留，最后一行的词元就是白得的*奖励词元*（bonus token）。
# 所以一轮得到 1 到 k + 1 个词元。

# %% tags=["fold"]
from trueup.core.picture import boxes

boxes([("row's token", ["50", "7", "3", ("9", "bad")]), ("argmax of row", ["7", "3", "8", ("9", "pad")]),
       ("the round yields", ["7", "3", "8"])],
      ("Pending token 50, drafts 7, 3, 9. The third draft should have been 8. Its own row (dashed) counts for nothing, "
       "whatever it says.",
       "从上到下：各行的词元，各行的 argmax，这一轮得到的词元。待定词元是 50，草稿是 7、3、9。"
       "第三个草稿本该是 8。它自己的那一行（虚线）不管说什么都不算数。"))

# %%
import torch

from trueup.core.sampling import verify_greedy

logits = torch.nn.functional.one_hot(torch.tensor([7, 3, 8, 9]), 64).float()  # [W, V]
assert verify_greedy(logits, (7, 3, 9)) == (2, 8)  # two kept, then 8
assert verify_greedy(logits, (7, 3, 8)) == (3, 9)  # all kept, and the bonus token
assert verify_greedy(logits, (1, 3, 8)) == (0, 7)  # the others are right by chance: dropped

# %% [markdown] tags=["en"]
# ## Sampling: keep, or replace from the residual
#
# Now the target does not name one token but has a distribution p, after temperature and filters. The draft x was drawn
# from the drafter's distribution q. The rule: keep x with probability min(1, p(x)/q(x)). Otherwise replace it by a draw
# from the *residual distribution*, max(p - q, 0) divided by its sum, and stop there.
#
# Why does p come out? Token x can appear in two ways. As a kept draft:
#
# $$ q(x) \cdot \min(1, p(x)/q(x)) = \min(p(x), q(x)) $$
#
# Or as the replacement. Something is rejected with probability $1 - \sum \min(p, q)$, which equals $\sum \max(p - q, 0)$.
# That cancels the divisor of the residual, and what remains for x is $\max(p(x) - q(x), 0)$. The two together:
#
# $$ \min(p(x), q(x)) + \max(p(x) - q(x), 0) = p(x) $$

# %% [markdown] tags=["zh"] pair="4eeaef-83d26b"
# ## 采样：保留，或者从残差分布里补
#
# 这时目标模型给出的不是一个词元，而是一个分布 p（温度和各种过滤之后的）。草稿 x 是从草稿器的分布 q 里抽出来的。
# 规则是：以概率 min(1, p(x)/q(x)) 保留 x；否则从*残差分布*里抽一个词元代替它，这一轮到此为止。
# 残差分布就是 max(p - q, 0) 除以它的总和。
#
# 为什么这样得到的恰好是 p？词元 x 有两种出现方式。一种是作为草稿被保留：
#
# $$ q(x) \cdot \min(1, p(x)/q(x)) = \min(p(x), q(x)) $$
#
# 另一种是作为替补。有草稿被拒绝的概率是 $1 - \sum \min(p, q)$，它等于 $\sum \max(p - q, 0)$，
# 正好与残差分布的分母约掉，留给 x 的就是 $\max(p(x) - q(x), 0)$。两者相加：
#
# $$ \min(p(x), q(x)) + \max(p(x) - q(x), 0) = p(x) $$

# %%
p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)  # [V], the target's
q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)  # [V], the drafter's
kept_part, replaced_part = torch.minimum(p, q), (p - q).clamp(min=0)  # [V], [V]
assert torch.allclose(kept_part + replaced_part, p, atol=1e-15)
assert torch.allclose(1 - kept_part.sum(), replaced_part.sum(), atol=1e-15)

# %% tags=["fold"]
from IPython.display import HTML

parts, high = [], 360  # pixels of probability 1
for x, (a, b) in enumerate(zip(p.tolist(), q.tolist(), strict=True)):
    left, both, floor = 20 + 90 * x, min(a, b) * high, 165
    parts.append(f'<rect x="{left}" y="{floor - both:g}" width="60" height="{both:g}" fill-opacity="0.35"/>')
    look = 'fill="url(#hatch)"' if a > b else 'fill="none" stroke-dasharray="4"'
    parts.append(f'<rect x="{left}" y="{floor - max(a, b) * high:g}" width="60" height="{abs(a - b) * high:g}" '
                 f'stroke="currentColor" {look}/>')
    for line, label in enumerate((x, f"p {a}, q {b}")):
        parts.append(f'<text x="{left + 30}" y="{floor + 17 * (line + 1)}" text-anchor="middle">{label}</text>')
words = ("Tokens 0 to 3. Filled: min(p, q), drafts that are kept. Hatched: max(p - q, 0), replacements; with the filled "
         "part it makes p. Dashed: drafts that are rejected.",
         "词元 0 到 3。实心：min(p, q)，保留的草稿。斜线：max(p - q, 0)，替补；与实心部分合起来就是 p。虚线：被拒绝的草稿。")
HTML('<figure class="trueup-picture"><svg viewBox="0 0 380 206" width="380" style="max-width:100%;height:auto" '
     f'role="img" aria-label="p as the sum of kept drafts and replacements" fill="currentColor" font-size="13"><defs>'
     '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M0 6L6 0" stroke="currentColor"/>'
     f'</pattern></defs>{"".join(parts)}</svg><figcaption><span lang="en">{words[0]} </span>'
     f'<span lang="zh">{words[1]}</span></figcaption></figure>')

# %% [markdown] tags=["en"]
# ## Every case, by the code that runs
#
# The proof is about formulas. What runs is `verify(p, q, drafts, uniforms)`, and it can be checked as it is, because it
# does not draw its random numbers but is given them: one number in [0, 1) for each draft, and one for the token at the
# end. For given drafts its answer is a step function of these numbers: a draft's number matters only where it passes
# p(x)/q(x), the last one only where it passes a cumulative sum of what is drawn from. So cut [0, 1) at all these places,
# call `verify` once in every piece, and weigh the answer with the piece's length. There is no sampling error: the table
# is exact up to float64 rounding.

# %% [markdown] tags=["zh"] pair="9094fc-8c0143"
# ## 用真正在跑的代码，穷举所有情形
#
# 上面证明的是公式，真正在跑的是 `verify(p, q, drafts, uniforms)`。它可以原封不动地拿来检查，因为随机数不由它自己产生，而是传给它的：
# 每个草稿一个 [0, 1) 中的数，末尾那个词元再要一个。草稿给定时，它的结果是这些数的阶梯函数：
# 草稿的那个数只在越过 p(x)/q(x) 时起作用，末尾的那个数只在越过所抽分布的累积和时起作用。
# 所以在这些地方把 [0, 1) 切开，每一段调用一次 `verify`，再按段长加权。这里没有抽样误差：得到的表只差 float64 的舍入。

# %%
import itertools
import math
from collections import defaultdict

from trueup.core.sampling import draw, verify


def pieces(cuts):  # [0, 1) between its cuts: (middle, length) of each piece
    ends = sorted({0.0, 1.0, *(float(cut) for cut in cuts if 0 < cut < 1)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(ends)]


def outcomes(rule, p, q, drafts):  # {tokens of the round: probability}, for given drafts
    residuals = [(a - b).clamp(min=0) for a, b in zip(p, q, strict=False)]
    drawn = [*p, *residuals, *(r.softmax(-1) for r in residuals)]  # what the last draw may be from
    axes = [pieces([a[x] / b[x]]) for a, b, x in zip(p, q, drafts, strict=False)]
    axes.append(pieces(cut for w in drawn if w.sum() for cut in w.cumsum(0) / w.sum()))
    found = defaultdict(float)
    for choice in itertools.product(*axes):
        kept, token = rule(torch.stack(p), torch.stack(q), drafts, [u for u, _ in choice])
        found[(*drafts[:kept], token)] += math.prod(length for _, length in choice)
    return found

# %% [markdown] tags=["en"]
# One draft first, over a vocabulary of four tokens. `rate` is the *acceptance*, the share of drafts that are kept.
# It is known beforehand: $\sum \min(p, q)$.

# %% [markdown] tags=["zh"] pair="1636de-b96712"
# 先看一个草稿的情形，词表只有四个词元。`rate` 是*接受率*，即草稿被保留的比例。它的值事先就知道：$\sum \min(p, q)$。

# %%
def first_token(rule, p, drawn_from, told=None):  # its distribution [V], and the acceptance
    said, rate = torch.zeros(4, dtype=torch.float64), 0.0
    for x in range(4):
        if chance := float(drawn_from[x]):
            q = drawn_from if told is None else told
            for (token, *rest), weight in outcomes(rule, [p, p], [q], (x,)).items():
                said[token] += chance * weight
                rate += chance * weight * len(rest)  # a kept draft has a bonus token behind it
    return said, rate


def show(name, said, rate=None):
    line = " ".join(f"{s:.3f}" for s in said)
    print(f"{name:<30} {line}" + ("" if rate is None else f"   acceptance {rate:.2f}"))


said, rate = first_token(verify, p, q)
show("p", p)
show("verify", said, rate)
assert (said - p).abs().max() < 1e-12
assert abs(rate - torch.minimum(p, q).sum()) < 1e-12  # 0.6

# %% [markdown] tags=["en"]
# Now two drafts, where p and q depend on the tokens before. A round yields one to three tokens; where it yields fewer,
# the next rounds go on with the target's own distribution. All 64 texts of three tokens must be as likely as the target
# alone makes them: kept drafts, replacements and bonus tokens are all in there. (The project's own tests do this for
# other tables, with impossible and with certain tokens among them.)

# %% [markdown] tags=["zh"] pair="5d3738-449ee7"
# 再看两个草稿，而且 p 和 q 都随前面的词元而变。一轮得到一到三个词元；不足三个的，由后面几轮按目标模型自己的分布接着写。
# 三个词元的文本一共 64 种，每一种的概率都必须与目标模型单独生成时相同。保留的草稿、替补、奖励词元，全都算在里面。
# （项目自己的测试还对另一些分布做同样的事，其中有概率为 0 和概率为 1 的词元。）

# %%
generator = torch.Generator().manual_seed(1)
prefixes = [text for n in range(3) for text in itertools.product(range(4), repeat=n)]
P, Q = ({text: torch.rand(4, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
         for text in prefixes} for _ in range(2))


def likelihood(text, start=0):  # of text[start:], by the target alone
    return math.prod(float(P[text[:i]][text[i]]) for i in range(start, len(text)))


total = defaultdict(float)
for drafts in itertools.product(range(4), repeat=2):
    chance = Q[()][drafts[0]] * Q[drafts[:1]][drafts[1]]
    rows = [P[drafts[:i]] for i in range(3)], [Q[drafts[:i]] for i in range(2)]
    for head, weight in outcomes(verify, *rows, drafts).items():
        for rest in itertools.product(range(4), repeat=3 - len(head)):
            total[head + rest] += float(chance) * weight * likelihood(head + rest, len(head))

assert len(total) == 64
assert max(abs(total[text] - likelihood(text)) for text in total) < 1e-12

# %% [markdown] tags=["en"]
# Equal in distribution does not mean equal token for token. The same random number, with and without a draft:

# %% [markdown] tags=["zh"] pair="9f2c1f-a6dc0a"
# 分布相同，不等于逐词元相同。同一个随机数，有草稿和没有草稿，结果可以不同：

# %%
assert draw(p, 0.05) == 0
kept, bonus = verify(torch.stack([p, p]), q[None], (3,), [0.05, 0.05])
assert (kept, bonus) == (1, 0)  # draft 3 is kept, so the text is 3, 0

# %% [markdown] tags=["en"]
# ## The wrong way: a softmax where a division belongs
#
# [SB-31](../bugs.md#sb-31): the replacement was drawn from a softmax of the clipped difference. A softmax makes
# everything sum to 1, too, but it gives weight to every token, even those of which p has nothing left. Tests with greedy
# decoding do not notice: comparing ids draws no replacement. The table does:

# %% [markdown] tags=["zh"] pair="3e3e45-1057da"
# ## 错误的做法：该做除法，却做了 softmax
#
# [SB-31](../bugs.md#sb-31)：替补是从“截到零的差做 softmax”里抽的。softmax 的结果加起来也是 1，可它给每个词元都分了权重，
# 连 p 那里已经没有余量的词元也有份。贪心解码的测试发现不了，因为比较 id 时根本不抽替补。这张表能发现：

# %% tags=["raises-exception"] raises="AssertionError" says="token 0 comes out with 0.221, not 0.400"
def softmax_residual(p, q, drafts, uniforms):
    kept, token = verify(p, q, drafts, uniforms)
    if kept < len(drafts):
        token = draw((p[kept] - q[kept]).clamp(min=0).softmax(-1), uniforms[-1])
    return kept, token


drifted, drifted_rate = first_token(softmax_residual, p, q)
assert (drifted - p).abs().max() < 1e-12, f"token 0 comes out with {drifted[0]:.3f}, not {p[0]:.3f}"

# %% [markdown] tags=["en"]
# Its acceptance is right, by the way, so that number says nothing about it. In the next case the number is the alarm.
#
# ## Acceptance of exactly 1
#
# [SB-32](../bugs.md#sb-32): on a device without the usual generator the random number was a constant 0, and
# `0 * q(x) < p(x)` keeps every draft. The dashboard shows a perfect drafter. But the text that comes out is the
# drafter's, not the target's. For p unlike q, an acceptance of exactly 1.0 is a failure in itself.

# %% [markdown] tags=["zh"] pair="51839e-c39926"
# 顺便说一句，它的接受率是对的，所以光看接受率看不出来。下一个错误则相反，接受率本身就是警报。
#
# ## 接受率恰好是 1
#
# [SB-32](../bugs.md#sb-32)：设备上没有平常用的随机数发生器，随机数成了常数 0，而 `0 * q(x) < p(x)` 会保留每一个草稿。
# 监控面板上看，草稿器完美无缺；可出来的文本是草稿器的，不是目标模型的。p 与 q 不同而接受率恰好是 1.0，这本身就是故障。

# %%
def stuck_at_zero(p, q, drafts, uniforms):
    return verify(p, q, drafts, [0.0] * len(drafts) + [uniforms[-1]])


perfect, perfect_rate = first_token(stuck_at_zero, p, q)
show("p", p)
show("SB-31, softmax", drifted, drifted_rate)
show("SB-32, constant 0", perfect, perfect_rate)
assert abs(drifted_rate - 0.6) < 1e-12
assert perfect_rate == 1.0 and (perfect - q).abs().max() < 1e-12

# %% [markdown] tags=["en"]
# ## q is what the draft was drawn from
#
# The rule uses q twice, and the proof needs it to be the distribution that x was really drawn from: after the same
# temperature and the same filters. Which q it is does not matter, only that it is told truly. A drafter that takes its
# likeliest token has not drawn at all: its q is 1 at that token and 0 elsewhere, and the draft is kept with probability
# p(x). Two drafters, each with a true and with a false q: one draws at temperature 0.5 (cold), the false q being that of
# temperature 1 (warm); the other takes the argmax, the false q being its softmax.

# %% [markdown] tags=["zh"] pair="065b38-4ff0fa"
# ## q 必须是草稿真正的来源
#
# 规则里两处用到 q，证明要求它就是抽出 x 的那个分布：同样的温度，同样的过滤。q 是什么样都行，但必须如实告知。
# 如果草稿器直接取概率最大的词元，那就根本没有抽样：它的 q 在这个词元上是 1，其余是 0，草稿以概率 p(x) 保留。
# 下面两个草稿器，各用真的和假的 q 跑一次：一个在温度 0.5 下抽（cold），假的 q 是温度 1 的（warm）；
# 另一个取 argmax，假的 q 是它的 softmax。

# %%
cold = (q.log() / 0.5).softmax(-1)  # [V], the same logits at temperature 0.5
certain = torch.nn.functional.one_hot(q.argmax(), 4).double()  # [V]
cases = {
    "drawn cold, told cold": (cold, cold), "drawn cold, told warm": (cold, q),
    "argmax, told certain": (certain, certain), "argmax, told its softmax": (certain, q),
}
show("p", p)
gaps = {}
for name, (drawn_from, told) in cases.items():
    said, rate = first_token(verify, p, drawn_from, told)
    show(name, said, rate)
    gaps[name] = float((said - p).abs().max())
assert max(gaps["drawn cold, told cold"], gaps["argmax, told certain"]) < 1e-12
assert min(gaps["drawn cold, told warm"], gaps["argmax, told its softmax"]) > 0.04

# %% [markdown] tags=["en"]
# In trueup one call draws and tells, so the two cannot differ. It takes the request's own temperature and filters; not
# because the rule needs them, but because a token that p's filters have removed would be drafted for nothing.

# %% [markdown] tags=["zh"] pair="9470db-ac0d9e"
# 在 trueup 里，抽取和告知是同一次调用，两者不可能不一致。它用的是请求自己的温度和过滤；规则并不要求这样，
# 只是被 p 的过滤去掉的词元，提了也白提。

# %%
from trueup.core.sampling import Sampler, probabilities

settings = SamplingParams(temperature=0.7, top_k=2, seed=3)
draft, told = Sampler(settings).draft(q.log())
assert torch.equal(told, probabilities(q.log()[None], settings)[0])
assert told[draft] > 0 and int((told > 0).sum()) == 2

# %% [markdown] tags=["en"]
# ## Where a run ends
#
# The text must also end where plain decoding ends it. An end-of-text token may stand inside a run of kept drafts: what
# is behind it was never said, and must not be counted as said ([SB-35](../bugs.md#sb-35)). And `max_tokens` may lie inside a run: trueup drafts only as many tokens as still fit.
# The model here is a [`ScriptedModel`][trueup.core.ScriptedModel], whose text is arithmetic, with a drafter that is
# always right.

# %% [markdown] tags=["zh"] pair="c9f00d-f65898"
# ## 一段在哪里结束
#
# 文本结束的位置也必须与普通解码一致。结束词元可能出现在一段保留下来的草稿中间：
# 它后面的词元从来没有说出口，也就不能计入用量（[SB-35](../bugs.md#sb-35)）。
# `max_tokens` 也可能落在一段中间：trueup 只提还放得下的那么多草稿。
# 这里用的模型是 [`ScriptedModel`][trueup.core.ScriptedModel]，它的文本按算术规则生成；草稿器永远正确。

# %%
from trueup.core import Engine, ScriptedModel


def finish(eos=(), max_tokens=12):
    model = ScriptedModel(eos_token_ids=eos)
    engine = Engine(model, drafter=ScriptedDrafter(model.expected, (4,), 4, model.vocab_size))
    engine.add([5, 6, 7], SamplingParams(max_tokens=max_tokens))
    rounds = []
    while engine.has_work:
        rounds.append(engine.step())
    return rounds, [token for done in rounds for token in done.tokens[1]]


plain = ScriptedModel().expected([5, 6, 7], 12)
rounds, text = finish(eos=(plain[3],))
assert text == plain[:4] and rounds[-1].finished == {1: "stop"}
last = rounds[-1]
assert (last.accepted[1], len(last.tokens[1])) == (4, 3)  # four drafts were right, three said

rounds, text = finish(max_tokens=8)
assert text == plain[:8] and rounds[-1].finished == {1: "length"}
assert [len(done.drafted.get(1, ())) for done in rounds] == [0, 4, 1]  # 1 + 5 + 2 tokens

# %% [markdown] tags=["en"]
# ## Equal up to rounding
#
# One reservation remains. A verification runs W rows where plain decoding runs one, and a kernel may add up in another
# order for another shape. In bfloat16, whose step above 1 is $2^{-7}$, that can decide between two tokens that are
# almost equally likely:

# %% [markdown] tags=["zh"] pair="3c69d7-f0a9c5"
# ## 除舍入之外相同
#
# 还有一点要说明。验证时一次算 W 行，普通解码一次算一行；形状变了，内核累加的顺序可能也跟着变。
# bfloat16 在 1 以上的间隔是 $2^{-7}$，两个词元的概率几乎相等时，这就可能决定谁胜出：

# %%
terms = torch.tensor([1, 2**-8, 2**-8], dtype=torch.bfloat16)
from_the_left, from_the_right = (terms[0] + terms[1]) + terms[2], terms[0] + (terms[1] + terms[2])
assert (float(from_the_left), float(from_the_right)) == (1.0, 1.0078125)

row = torch.ones(2, 2, dtype=torch.bfloat16)  # [W, V]: two tokens with the logit 1
assert verify_greedy(row, (1,))[0] == 0
row[0, 1] = from_the_right
assert verify_greedy(row, (1,))[0] == 1

# %% [markdown] tags=["en"]
# So test in two ways. In float32 demand equal texts. In bfloat16 go to the first difference, and demand that the
# target's two best logits there are within a bound that you state. A difference without a near tie is a bug.
#
# ## What real engines do
#
# - vLLM names the three kinds of token *accepted*, *recovered* (the replacement) and *bonus*. Where a drafter gives no
#   probabilities, as in n-gram drafting, a draft counts as certain (`vllm/v1/sample/rejection_sampler.py`).
# - SB-31 was in transformers (PR #28508), SB-32 in vllm-ascend (PR #13470).
# - sglang has `speculative_accept_threshold_single` and `speculative_accept_threshold_acc`
#   (`python/sglang/srt/server_args.py`). At 1.0, the default, verification is exact. Below it more drafts are kept, and
#   the text is no longer the target's: a trade, and one should know that one makes it.
#
# ## Exercises
#
# **1.** In greedy decoding draft 1 is wrong, but draft 2 is the argmax of *its* row. Why not keep draft 2 behind the
# replacement?

# %% [markdown] tags=["zh"] pair="21ba1a-9e50c5"
# 所以测试分两种。float32 下要求文本完全相同。bfloat16 下找到第一处不同，要求目标模型在那里最大的两个 logits 之差不超过事先声明的界限。
# 如果这两个 logits 并不接近，文本却不同，那就是 bug。
#
# ## 真实引擎怎么做
#
# - vLLM 把三种词元分别叫 *accepted*、*recovered*（即替补）和 *bonus*。草稿器不给概率时，例如 n-gram 草稿，草稿按确定的处理
#   （`vllm/v1/sample/rejection_sampler.py`）。
# - SB-31 出现在 transformers（PR #28508），SB-32 出现在 vllm-ascend（PR #13470）。
# - sglang 有 `speculative_accept_threshold_single` 和 `speculative_accept_threshold_acc` 两个参数
#   （`python/sglang/srt/server_args.py`）。默认是 1.0，验证是精确的；调低之后会保留更多草稿，但文本不再是目标模型的了。
#   这是一种取舍，要知道自己在取舍。
#
# ## 练习
#
# **1.** 贪心解码时，第 1 个草稿错了，第 2 个草稿却恰好是*它那一行*（前一行）的 argmax。为什么不能把第 2 个草稿接在替补后面？

# %% [markdown] tags=["en", "solution"]
# Because that row was computed behind the wrong draft. Behind the replacement the target says something else.

# %% [markdown] tags=["zh", "solution"] pair="5480ae-d34f8e"
# 因为那一行是接在错误的草稿后面算的。接在替补后面，目标模型会说别的。

# %% tags=["solution"]
model = ScriptedModel()
[right] = model.expected([5, 6, 7], 1)
assert model.expected([5, 6, 7, right + 1], 1) != model.expected([5, 6, 7, right], 1)

# %% [markdown] tags=["en"]
# **2.** Which q has the highest acceptance? And what is that of a drafter that knows p and always proposes its argmax?

# %% [markdown] tags=["zh"] pair="390f3d-060069"
# **2.** 哪个 q 的接受率最高？如果草稿器知道 p，并且总是提 p 的 argmax，接受率又是多少？

# %% [markdown] tags=["en", "solution"]
# $\sum \min(p, q)$ is 1 for q = p and for no other. The argmax is kept with probability max p, here 0.4. So where the
# target samples, a drafter whose q is near p does better to sample, too.

# %% [markdown] tags=["zh", "solution"] pair="a6f474-b9c82b"
# $\sum \min(p, q)$ 只在 q = p 时等于 1。总提 argmax 时，接受率是 p 的最大值，这里是 0.4。
# 所以目标模型采样时，只要 q 与 p 接近，草稿器也采样更划算。

# %% tags=["solution"]
best = torch.nn.functional.one_hot(p.argmax(), 4).double()  # [V]
assert abs(first_token(verify, p, p)[1] - 1) < 1e-12
assert abs(first_token(verify, p, best)[1] - 0.4) < 1e-12

# %% [markdown] tags=["en"]
# **3.** The target uses `top_k=2`; the drafter draws from all of its q and says so. Is the text still right? What does
# it cost?

# %% [markdown] tags=["zh"] pair="7acea2-3b7130"
# **3.** 目标模型用了 `top_k=2`，草稿器从没有过滤的 q 里抽，并且如实告知。文本还对吗？代价是什么？

# %% tags=["solution"]
top2 = SamplingParams(temperature=1.0, top_k=2)
p2, q2 = (probabilities(x.log()[None], top2)[0] for x in (p, q.flip(0)))  # [V], [V]
said, unfiltered = first_token(verify, p2, q.flip(0))
assert (said - p2).abs().max() < 1e-12  # right
assert unfiltered < first_token(verify, p2, q2)[1] - 0.1  # it drafts what can never be kept

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there. The random numbers of a verification are drawn on the host, one stream a
# request, so they do not depend on a device's generator. No device has run this chapter yet: see [what ran
# where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="f9b01a-4fe276"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能运行。验证用的随机数在主机上产生，每个请求一条序列，所以不依赖设备的随机数发生器。
# 本章还没有在任何设备上运行过，见[哪些在哪里跑过](../what-ran-where.md)。
