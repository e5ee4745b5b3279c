# ---
# title:
#   en: "12. Why is my acceptance low?"
#   zh: "12. 接受率为什么低？"
# outcome:
#   en: acceptance counted one way, the speed to expect from it, and a way to find what a drafter is fed wrongly
#   zh: 按同一种口径统计接受率，由它估出该有的加速，并会查出草稿器收到的哪个输入是错的
# minutes: 18
# prerequisites:
#   en: "[chapter 9](ch09_mtp.md) (the MTP layer), [chapter 10](ch10_eagle.md) (a round), [chapter 11](ch11_lossless.md)"
#   zh: "[第 9 章](ch09_mtp.md)（MTP 层）、[第 10 章](ch10_eagle.md)（一轮）、[第 11 章](ch11_lossless.md)"
# bugs: [SB-18, SB-21, SB-37, SB-38]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** Verification repairs whatever a drafter does wrong ([chapter 11](ch11_lossless.md)). So a fault in
# drafting leaves the text right. It shows in one number, the *acceptance*, and some faults do not show even there.
# Therefore: count that number in one way, know what it should buy, and when it is low, check what the drafter is fed,
# input by input.
#
# ## One way to count
#
# Three drafts a round, and three rounds that keep 3, 0 and 1 of them:

# %% [markdown] tags=["zh"] pair="e88cca-a15adb"
# **要点。** 草稿器不管哪里出错，验证都会补救（[第 11 章](ch11_lossless.md)）。所以草稿出了问题，文本照样是对的，
# 只在一个数上看得出来，就是*接受率*；有些问题连它也看不出来。因此：接受率要按同一种口径统计；
# 要知道它该换来多少加速；它偏低时，不要对着这个数猜，把草稿器收到的输入逐项查一遍。
#
# ## 一种口径
#
# 每轮三个草稿，三轮分别保留了 3、0、1 个：

# %% tags=["fold"]
from trueup.core.picture import boxes

gone = ("draft", "pad")
boxes([("round 1", ["draft", "draft", "draft", "token"]), ("round 2", [gone, gone, gone, "token"]),
       ("round 3", ["draft", gone, gone, "token"])],
      ("Dashed drafts were rejected. Each round also yields one token of the target's own.",
       "每行是一轮：draft 是草稿，虚线的被拒绝；token 是每轮还会得到的、目标模型自己的一个词元。"))

# %%
from trueup.core.speculation.acceptance import Acceptance

counted = Acceptance()
for kept in (3, 0, 1):
    counted.add_row(proposed=3, kept=kept)

assert counted.tokens_per_round == (4 + 1 + 2) / 3  # what a round yields, the target's token with it
assert counted.rate == 4 / 9  # drafts kept, of those proposed
assert counted.by_depth == [2 / 3, 1 / 3, 1 / 3]  # of all rounds: those that kept draft 1, 2, 3
assert counted.conditional == [2 / 3, 1 / 2, 1]  # the same, of the rounds that kept all drafts before it

# %% [markdown] tags=["en"]
# The *depth* of a draft is its place in the round, from 1. By depth there are two shares, and reports often do not say
# which one they mean. `by_depth` falls by itself, since a draft behind a rejected one is lost. `conditional` says how
# good the drafter is at that depth. The first is the running product of the second. Its sum, and one for the target's own
# token, are the tokens a round:

# %% [markdown] tags=["zh"] pair="657338-90d11f"
# 草稿的*深度*是它在一轮里的位次，从 1 数起。按深度统计有两种比例，报告里常常不说是哪一种。`by_depth` 本来就会越来越低，
# 因为被拒绝的草稿后面的都作废了；`conditional` 才说明草稿器在那个深度上有多准。
# 前者是后者的累乘；把前者加起来，再加上目标模型自己的那一个，就是每轮的词元数：

# %%
from itertools import accumulate
from operator import mul

products = list(accumulate(counted.conditional, mul))
assert all(abs(a - b) < 1e-12 for a, b in zip(products, counted.by_depth, strict=True))
assert abs(1 + sum(counted.by_depth) - counted.tokens_per_round) < 1e-12

# %% [markdown] tags=["en"]
# The wrong way, [SB-37](../bugs.md#sb-37): programs that leave the definition open report different numbers for one run.
# One counts drafts. One counts the target's token as if it had been a draft. One has a round of placeholders in it, which
# a padded row brought along.

# %% [markdown] tags=["zh"] pair="5f8bc8-a7b773"
# 错误的做法是 [SB-37](../bugs.md#sb-37)：不把定义说清楚，同一次运行，各个程序报的数就不一样。
# 一个只数草稿；一个把目标模型自己的词元也当草稿数；还有一个多数了一轮占位的草稿，那是填充行带来的。

# %% tags=["raises-exception"] raises="AssertionError" says="0.44, 0.58 or 0.33"
reports = [4 / 9, (4 + 3) / (9 + 3), 4 / (9 + 3)]
assert len(set(reports)) == 1, "the acceptance is " + "{:.2f}, {:.2f} or {:.2f}".format(*reports)

# %% [markdown] tags=["en"]
# So compare two engines by `tokens_per_round`, or by shares whose definition you know. Divide sums by sums; the mean of
# each request's share is another number. Speed is delivered tokens by time, not streamed chunks, which may carry several
# tokens each.
#
# ## What it should buy
#
# For k drafts a round costs one verification (k + 1 rows of the target), one *extend* (k + 1 rows of the draft layer; the
# next round's first draft comes out of it), and k - 1 draft steps. With the time of a plain decode step as the unit:
#
# $$ \text{speed} = \frac{\text{tokens per round}}{\text{verify} + \text{extend} + (k - 1) \cdot \text{draft}} $$
#
# Decoding mostly waits for weights to be read, so let a forward cost the weights that it reads. A verification reads the
# same weights as a plain step, unless there are experts: each row chooses K of E, here as if independently, and more rows
# choose more of them.

# %% [markdown] tags=["zh"] pair="8ec63a-bd11cf"
# 所以，比较两个引擎，要么看 `tokens_per_round`，要么看定义明确的比例。比例是总和除以总和；各请求的比例再求平均，是另一个数。
# 速度是交付的词元数除以时间，不能拿流式输出的片段当词元数，一个片段里可能有好几个词元。
#
# ## 该换来多少加速
#
# 打 k 个草稿，一轮的开销有三部分：一次验证（目标模型 k + 1 行）；一次*扩展*（草稿层 k + 1 行，下一轮的第一个草稿由它产出）；
# 还有 k - 1 个草稿步。以普通解码一步的时间为单位，加速 speed 就是：
#
# $$ \text{speed} = \frac{\text{tokens per round}}{\text{verify} + \text{extend} + (k - 1) \cdot \text{draft}} $$
#
# 解码的时间主要花在读权重上，所以用一次前向要读的权重量来计算它的开销。验证读的权重与普通一步相同，除非有专家：
# 每一行从 E 个专家里选 K 个（这里当作各行独立地选），行数多了，选中的专家也就多了。

# %%
import torch

from trueup.models import LLM

torch.set_num_threads(1)  # a model this small is slower on more
llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
nano = llm.model.config


def weights(c, layers, rows):  # how many a forward of so many rows reads; the head is always there
    H, N, R, Rq = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank
    Dn, Dr, Dv = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    attention = Rq * (H + N * (Dn + Dr)) + (R + Dr) * H + N * R * (Dn + Dv) + N * Dv * H
    E, K = c.n_routed_experts, c.num_experts_per_tok
    experts = E * (1 - (1 - K / E) ** rows) + c.n_shared_experts  # those that some row chose
    mlp = {True: experts * c.moe_intermediate_size, False: c.intermediate_size}  # widths
    return sum(attention + 3 * H * mlp[c.moe_layers[i]] for i in layers) + c.vocab_size * H


counted_here = weights(nano, range(3), rows=10**6)  # so many rows that every expert is read
matrices = {name: p for name, p in llm.model.named_parameters() if p.ndim > 1}
stored = sum(p.numel() for name, p in matrices.items() if name != "embed" and "mtp" not in name)
assert abs(counted_here / stored - 1) < 0.01

# %% [markdown] tags=["en"]
# Now measure the nano model's acceptance with k = 3, and put it into the formula: for the nano model, and for
# GLM-4.7-Flash as if its drafts were kept as often.

# %% [markdown] tags=["zh"] pair="5cd7e6-77cc7a"
# 现在测出 nano 模型在 k = 3 时的接受率，代入公式：一次用 nano 模型的尺寸；
# 一次用 GLM-4.7-Flash 的尺寸，假设它的草稿保留得一样多。

# %%
from dataclasses import replace

from trueup.models.acceptance import measure

texts = ["class Stack:\n    def __init__(self", "import os\nimport sys\n\ndef main(",
         "for name in sorted(", "def read(path):\n    with open(path",
         "class Node:\n    def __init__(self, value", "try:\n    import json\nexcept "]
prompts = [llm.tokenizer.encode(text) for text in texts]
healthy = measure.run(llm.model, "mtp", 3, prompts, 32, record=True)
yields = healthy.acceptance.tokens_per_round

flash = replace(nano, vocab_size=154880, hidden_size=2048, num_hidden_layers=47, num_attention_heads=20,
                q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, intermediate_size=10240,
                moe_intermediate_size=1536, n_routed_experts=64, num_experts_per_tok=4,
                moe_layers=(False,) + (True,) * 47)  # zai-org/GLM-4.7-Flash: config.json
print("kept, of all rounds:     ", *(f"{share:.2f}" for share in healthy.acceptance.by_depth))
print("kept, of those before it:", *(f"{share:.2f}" for share in healthy.acceptance.conditional))
assert yields > 2 and healthy.acceptance.conditional[2] > healthy.acceptance.by_depth[2]

# %%
def costs(c, batch, k):  # (verify, extend, draft), in plain decode steps
    layers, mtp, joint = range(c.num_hidden_layers), [c.num_hidden_layers], 2 * c.hidden_size**2
    plain, verify = (weights(c, layers, rows) for rows in (batch, batch * (k + 1)))
    extend, draft = (weights(c, mtp, rows) + joint for rows in (batch * (k + 1), batch))
    return verify / plain, extend / plain, draft / plain


def speed(c, batch, k, tokens):
    verify, extend, draft = costs(c, batch, k)
    return tokens / (verify + extend + (k - 1) * draft)


print("model  batch  verify extend  draft   times plain decoding")
for name, c in (("nano", nano), ("Flash", flash)):
    for batch in (1, 8, 64):
        shown = " ".join(f"{cost:6.2f}" for cost in costs(c, batch, 3))
        print(f"{name:<6} {batch:>5} {shown}   {speed(c, batch, 3, yields):.2f}")
assert 0.3 < costs(nano, 1, 3)[2] < 0.5 and speed(nano, 1, 3, yields) < 0.5 * yields
assert costs(flash, 1, 3)[0] > 2 and costs(flash, 64, 3)[0] < 1.1
assert speed(flash, 1, 3, yields) < speed(flash, 8, 3, yields) < speed(flash, 64, 3, yields)

# %% [markdown] tags=["en"]
# Two lessons. A tiny model gains little: its MTP layer stands beside three layers only, and every draft runs the head
# again, so a draft costs about two fifths of a step. And a model with many experts gains little from a *single* request,
# whose verification reads twice the weights. With 64 requests plain decoding reads nearly every expert anyway, and the
# extra rows cost almost nothing. (At some larger batch arithmetic becomes the limit. This count leaves that out, and
# reading the cache, too.) `trueup doctor acceptance --speed` measures the forwards on your machine, where extend is
# called learn, and prints the speed that they should give beside the one achieved.
#
# ## The clinic
#
# `healthy` ran with `record=True`: a recorder stood directly before the draft layer and noted all that arrived there.
# After the run the finished text is known, so one forward over it tells what each input should have been, with no
# drafting and no cache reuse. These are the inputs:

# %% [markdown] tags=["zh"] pair="564b70-08881e"
# 从表里能看出两点。小模型赚不了多少：MTP 层旁边总共只有三层，每个草稿又要再算一次 lm_head，
# 所以一个草稿要花掉一步的五分之二左右。专家很多的模型，*单个*请求也赚不了多少，因为验证要读两倍的权重。
# 到了 64 个请求，普通解码本来就几乎要读遍所有专家，多出来的行几乎没有代价。（batch 再大到一定程度，算力会成为瓶颈；
# 这里没有算它，也没有算读缓存的开销。）`trueup doctor acceptance --speed` 会在你的机器上实测各种前向的时间
# （扩展在那里叫 learn），并把它们应当带来的加速与实际得到的加速一起打印出来。
#
# ## 会诊：逐个检查输入
#
# 上面的 `healthy` 是带着 `record=True` 跑的：紧挨着草稿层放了一个记录器，凡是送进去的都记下来。
# 跑完之后文本已经确定，对它做一次前向，既不打草稿也不复用缓存，就知道每个输入本该是什么。要查的输入有这些：

# %%
for check in healthy.checks:
    print(f"{check.input:<10} {check.wrong} wrong of {check.seen:<4} {check.expected}")
assert all(check.ok and check.seen for check in healthy.checks)

# %% [markdown] tags=["en"]
# (p is a position. *Features* are what the drafter gets of the target, here its hidden state. *Carried* is what a request
# keeps from one round to the next.) Now plant faults, one at a time, each into a fresh drafter. Most are modelled on
# public reports. In every case the text stays right, and the broken input is among those that the checks call wrong:

# %% [markdown] tags=["zh"] pair="135134-127ccd"
# （p 是位置。features 是草稿器从目标模型那里拿到的东西，这里就是隐藏状态；carried 是一个请求从上一轮带到下一轮的东西。）
# 现在每次往一个新的草稿器里植入一种错误，大多是照着公开报告过的错误做的。每一种情形下文本都仍然正确，
# 而被弄坏的那个输入，都在检查判错的输入之中：

# %%
from trueup.models.acceptance.faults import FAULTS
from trueup.models.drafters import make_drafter

runs = {}
for fault in FAULTS:
    if fault.fits(make_drafter("mtp", llm.model, 3)):
        run = runs[fault.name] = measure.run(llm.model, "mtp", 3, prompts, 32, fault, record=True)
        wrong = [check.input for check in run.checks if not check.ok]
        assert run.text == healthy.text
        assert fault.input in wrong
        print(f"{fault.name:<28} kept {run.acceptance.rate:.2f}   wrong: {', '.join(wrong)}")
print(f"{'none':<28} kept {healthy.acceptance.rate:.2f}")

# %% [markdown] tags=["en"]
# What do they look like from outside, where only the shares by depth are known?

# %% [markdown] tags=["zh"] pair="917149-5a1154"
# 从外面看，也就是只知道按深度的比例时，它们是什么样子？

# %% tags=["fold"]
from IPython.display import HTML


def curve(shares, style):
    points = [(20 + 55 * depth, 85 - 75 * share) for depth, share in enumerate(shares)]
    line = f'<polyline points="{" ".join(f"{x},{y:.1f}" for x, y in points)}" fill="none" {style}/>'
    return line + "".join(f'<circle cx="{x}" cy="{y:.1f}" r="3"/>' for x, y in points if "dash" not in style)


panels = []
for name, run in sorted(runs.items(), key=lambda item: item[1].acceptance.rate):
    shares = run.acceptance.by_depth
    drawn = (curve(healthy.acceptance.by_depth, 'stroke="currentColor" stroke-dasharray="4 4"')
             + curve(shares, 'stroke="currentColor" stroke-width="2"'))
    panels.append(
        f'<div style="width:150px"><svg viewBox="0 0 150 104" width="150" fill="currentColor" font-size="11" role="img" '
        f'aria-label="{name}: {" ".join(f"{s:.2f}" for s in shares)}"><path d="M10 10V85H140" fill="none" '
        f'stroke="currentColor" stroke-opacity="0.5"/>{drawn}<text x="17" y="100">1</text><text x="72" y="100">2</text>'
        f'<text x="127" y="100">3</text></svg><div style="font-size:.7rem;line-height:1.3">{name}</div></div>')
HTML('<figure class="trueup-picture"><div style="display:flex;flex-wrap:wrap;gap:12px">' + "".join(panels) + "</div>"
     '<figcaption><span lang="en">Share kept at depths 1 to 3, of all rounds, from 0 to 1. Solid: with the fault. Dashed: '
     'without. </span><span lang="zh">深度 1 到 3 的保留比例（占全部轮数），纵轴从 0 到 1。实线：有错误；虚线：没有错误。</span>'
     "</figcaption></figure>")

# %% [markdown] tags=["en"]
# Three kinds of picture:
#
# - **Almost nothing is kept, from the first depth on.** The first draft comes out of extend, so look at what goes in there
#   or is carried from it: the shift of the tokens, the last token, the order of the join ([SB-18](../bugs.md#sb-18)), the
#   row and the request that drafting goes on from ([SB-19](../bugs.md#sb-19)).
# - **The first depth is as it was, and then it falls.** Only the later drafts depend on what one draft step hands to the
#   next. In *not fed back* each gets the target's hidden state again.
# - **Nothing to be seen.** The number of rounds here, about 60, leaves an uncertainty (standard error) of some 0.05 in each
#   share. These faults cost less than two of it. (*Stale rows* leaves out extend but for its last row.)

# %% [markdown] tags=["zh"] pair="bfc63f-54e7e8"
# 图形分三类：
#
# - **从第一个深度起就几乎全被拒绝。** 第一个草稿由扩展产出，所以要查送进扩展的和从中带出来的东西：词元有没有移位（tokens not shifted），末尾的词元是不是旧的（stale last token），拼接的次序对不对（join swapped，[SB-18](../bugs.md#sb-18)），接着往下猜的是不是被拒绝的那一行（row of a rejected draft）、别的请求的行（another request's row，[SB-19](../bugs.md#sb-19)）。
# - **第一个深度照旧，随后下跌。** 只有靠后的草稿才依赖上一个草稿步交出来的东西。not fed back 就是每一步拿到的都还是目标模型的隐藏状态。
# - **什么也看不出来。** 这里一共约 60 轮，每个比例的标准误差就有 0.05 左右，而这些错误的代价不到它的两倍。（stale rows 是扩展只跑了最后一行，前面的行没有重算。）

# %%
before, rate, rounds = healthy.acceptance.by_depth, healthy.acceptance.rate, healthy.acceptance.rows
error = (before[0] * (1 - before[0]) / rounds) ** 0.5  # of a share, standard
shares = {name: run.acceptance.by_depth for name, run in runs.items()}
at_once = {name for name, s in shares.items() if s[0] < 0.3}
later = {name for name, s in shares.items() if s[0] > before[0] - 0.1 and s[2] < before[2] - 0.2}
unseen = {name for name, run in runs.items() if run.acceptance.rate > rate - 2 * error}

for group in (at_once, later, unseen):
    print("; ".join(sorted(group)))
assert at_once >= {"tokens not shifted", "join swapped", "another request's row"}
assert "not fed back" in later and unseen >= {"hidden before the norm", "standing position"}
assert not (at_once & later or at_once & unseen or later & unseen)
assert 40 < rounds < 80 and 0.03 < error < 0.07

# %% [markdown] tags=["en"]
# ## Why two of them cannot be seen here
#
# **Hidden before the norm**, the other half of SB-18. The draft layer normalises its hidden input once more, and an RMS
# norm does not mind how long a vector is. All that differs is the weight of the target's final norm. In this model it is
# nearly the same for all channels, so the direction of the vector hardly changes. ([Chapter 9](ch09_mtp.md) makes a
# checkpoint on which the fault costs nearly everything.)

# %% [markdown] tags=["zh"] pair="28792b-967ddf"
# ## 其中两种在这里为什么看不见
#
# **取了归一化之前的隐藏状态**（hidden before the norm），即 SB-18 的另一半。草稿层会对隐藏状态再做一次归一化，
# 而 RMS 归一化不在乎向量有多长。剩下的差别只是目标模型最后那个归一化的权重。
# 在这个模型里，各通道的权重几乎相同，向量的方向也就几乎不变。（[第 9 章](ch09_mtp.md)造了一个检查点，
# 在它上面，同样的错误会让接受率几乎归零。）

# %%
with torch.inference_mode():
    final, again = llm.model.norm, llm.model.mtp[0].h_norm
    x = torch.randn(500, nano.hidden_size, generator=torch.Generator().manual_seed(0))  # [T, H]
    right, wrong = again(final(x)), again(x)  # [T, H], [T, H]
    assert torch.nn.functional.cosine_similarity(right, wrong).min() > 0.98
    assert final.weight.std() < 0.15 * final.weight.mean()

# %% [markdown] tags=["en"]
# **Standing position**: the draft steps do not advance. Rope is relative: the row turns its query and its own key alike,
# so only its distance to older rows is off, by a few positions at most. One position turns most pairs of channels by less
# than a tenth of a radian:

# %% [markdown] tags=["zh"] pair="f66d68-d0075f"
# **位置不动**（standing position）：草稿步没有把位置往前数。旋转位置编码（RoPE）是相对的：这一行的查询和它自己的键转的角度相同，
# 所以错的只是它到更早那些行的距离，最多差几个位置。而差一个位置，大多数通道对转过的角度还不到 0.1 弧度：

# %%
pairs = nano.qk_rope_head_dim // 2
angles = nano.rope_theta ** (-torch.arange(pairs) / pairs)  # radians by position
assert (angles < 0.1).float().mean() > 0.75

# %% [markdown] tags=["en"]
# On another checkpoint, or with more drafts, the same faults may cost much. The checks of the inputs do not depend on
# that: they compare what arrives with what should, and found both.
#
# **Lengths with rejected tokens**, [SB-21](../bugs.md#sb-21), costs little here for a third reason. There must have been
# a rejection, and then a draft step sees at most three keys too many, among all those of the text.
#
# ## Planned too early
#
# [SB-38](../bugs.md#sb-38) is the fault *stale last token*, and how it came about is worth a look. To save time an engine
# plans the next round while the device still works on this one. A device's work is a queue: a call returns at once, and
# the result appears later. Whoever reads the result tensor on another stream, without waiting, gets what was there
# before.

# %% [markdown] tags=["zh"] pair="03db0e-f32ed4"
# 换一个检查点，或者草稿再多几个，同样的错误可能代价很大。对输入的检查与此无关：它拿收到的与该收到的相比，两种都查了出来。
#
# **长度里含被拒绝的词元**（lengths with rejected tokens，[SB-21](../bugs.md#sb-21)）在这里代价不大，是第三种原因：
# 先要有草稿被拒绝；即使有，草稿步也最多多看到三个键，而整段文本的键有许多。
#
# ## 规划得太早
#
# [SB-38](../bugs.md#sb-38) 就是上面的 stale last token，它的来历值得一看。为了省时间，设备还在算这一轮，引擎就开始规划下一轮。
# 设备上的工作是一个队列：调用立即返回，结果过一会儿才出现。谁要是在另一条流上不等待就去读结果张量，读到的是上一轮留下的内容。

# %%
class Stream:
    def __init__(self):
        self.queue = []

    def launch(self, work):
        self.queue.append(work)

    def wait(self):
        while self.queue:
            self.queue.pop(0)()


main_stream, predicted = Stream(), torch.tensor([11])  # [B], token 11 is from the round before
main_stream.launch(lambda: predicted.fill_(42))
too_early = predicted.clone()
main_stream.wait()
assert (too_early.tolist(), predicted.tolist()) == ([11], [42])

# %% [markdown] tags=["en"]
# To pin such a race, use a draft model that is right whenever its inputs are: then every draft must be kept, always. Any
# other number is a fault. With k = 2, and the fault planted:

# %% [markdown] tags=["zh"] pair="ae2f28-41214a"
# 要用测试抓住这种竞态，就用一个“输入对它就对”的草稿模型：这样每个草稿都必须保留，出现任何别的数都是错误。
# 取 k = 2，再植入这个错误：

# %%
from trueup.core import Engine, ScriptedModel
from trueup.core.sampling import SamplingParams
from trueup.core.scripted import ScriptedDraftModel
from trueup.core.speculation.chain import ChainDrafter


def kept_by_round(fault=None):
    model = ScriptedModel()
    drafter = ChainDrafter(ScriptedDraftModel(model), 2)
    if fault:
        fault.plant(drafter)
    engine, kept, text = Engine(model, drafter=drafter), [], []
    engine.add([5, 6, 7], SamplingParams(max_tokens=13))
    while engine.has_work:
        done = engine.step()
        text += done.tokens[1]
        kept += [done.accepted[1]] if 1 in done.accepted else []
    assert text == model.expected([5, 6, 7], 13)  # right in any case
    return kept


stale = next(fault for fault in FAULTS if fault.case == "SB-38")
assert kept_by_round() == [2, 2, 2, 2]
assert set(kept_by_round(stale)) == {0}

# %% [markdown] tags=["en"]
# trueup plans from host integers only. What a drafter learns is a list of ints that the engine has read after the round,
# so there is nothing to read too early:

# %% [markdown] tags=["zh"] pair="c71a82-999d43"
# trueup 只用主机上的整数来规划。草稿器学到的是一列 int，是引擎在一轮结束之后读回来的，所以没有什么东西可以读得太早：

# %%
model, taught = ScriptedModel(), []
drafter = ChainDrafter(ScriptedDraftModel(model), 2)
learn = drafter.learn
drafter.learn = lambda fed: (taught.extend(fed), learn(fed))
engine = Engine(model, drafter=drafter)
engine.add([5, 6, 7], SamplingParams(max_tokens=4))
while engine.has_work:
    engine.step()
assert taught and all(type(token) is int for fed in taught for token in fed.next_tokens)

# %% [markdown] tags=["en"]
# ## If the low number is another engine's
#
# `trueup doctor acceptance --measured` takes the shares by depth that another engine reports, of all rounds, and ranks
# the faults by their distance from them:

# %% [markdown] tags=["zh"] pair="c00621-b567aa"
# ## 如果偏低的数来自别的引擎
#
# `trueup doctor acceptance --measured` 接受别的引擎报告的按深度的比例（占全部轮数），再把各种错误按与它的距离排序：

# %%
import contextlib
import io
import os
import tempfile
from pathlib import Path

from trueup.core.cli import main

os.environ["COLUMNS"] = "92"  # the width of what it prints
prompts_file = Path(tempfile.mkdtemp()) / "prompts.txt"
prompts_file.write_text("def read(path):\nclass Node:\nfor name in sorted(\n")  # one a line
command = ["doctor", "acceptance", "--prompts", str(prompts_file), "--measured", "0.6,0.3,0.1"]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    code = main(command)
report = printed.getvalue()
print(report[report.index("What it resembles"):])
assert code == 0 and all(name in report for name in ("stale last token", "not fed back", "this run"))

# %% [markdown] tags=["en"]
# Read it as a hint. Look at the distance: beyond 0.1 nothing is alike. Shares of 0.6, 0.3, 0.1 are 0.6, 0.5, 0.33 of
# those before, and a weak drafter without any fault may look like that. And these are signatures of the nano model: with
# `--model FOLDER` the command makes them from your own checkpoint. A certain answer comes from the inputs. In another
# engine that means: save what arrives at the draft layer in a few rounds, run the finished text through the target once,
# and compare, in the order of the list above.

# %% [markdown] tags=["zh"] pair="fd21ed-8d6ddc"
# 这只是线索。先看距离：超过 0.1 就谈不上像。0.6、0.3、0.1 换算成条件比例是 0.6、0.5、0.33，一个毫无错误但比较弱的草稿器也会这样。
# 另外，这里的特征来自 nano 模型；用 `--model 文件夹`，命令会用你自己的检查点来做。确定的答案要从输入里找。
# 在别的引擎里就是：把几轮里送进草稿层的东西存下来，把最终文本在目标模型里过一遍，再按上面列表的次序逐项比较。

# %%
measured = [0.6, 0.3, 0.1]
nearest = min(measure.distance(measured, s) for s in shares.values())
assert nearest > 0.1  # near nothing
assert [round(a / b, 2) for a, b in zip(measured, [1.0, *measured], strict=False)] == [0.6, 0.5, 0.33]

# %% [markdown] tags=["en"]
# ## What real engines do
#
# - vLLM logs a mean acceptance length, the target's token counted, and a "per-position acceptance rate", which is a share
#   of all rounds: what `--measured` wants (`vllm/v1/spec_decode/metrics.py`).
# - sglang logs `accept len`, the target's token counted, and `accept rate`. The latter has changed its meaning: earlier
#   versions count the target's token among the kept and among the proposed, 7/12 in the example above; later ones leave
#   it out, 4/9 (`python/sglang/srt/observability/scheduler_metrics_mixin.py`). Compare numbers of one version only.
# - SB-38 was in sglang (PR #28410): a cast of the predicted tokens had moved into the planning stream. SB-21 was in
#   vllm-ascend (PR #14883).
#
# ## Exercises
#
# **1.** A report says: accepted 85% at depth 1, 80% at depth 2, 80% at depth 3, of the drafts that were still in play.
# How many tokens does a round yield?

# %% [markdown] tags=["zh"] pair="86fe8c-ba4344"
# ## 真实引擎怎么做
#
# - vLLM 的日志里有平均接受长度（包含目标模型自己的词元），还有 “per-position acceptance rate”，它是占全部轮数的比例，
#   正是 `--measured` 要的（`vllm/v1/spec_decode/metrics.py`）。
# - sglang 的日志里有 `accept len`（包含目标模型自己的词元）和 `accept rate`。后者的含义变过：较早的版本把目标模型的词元同时计入保留数和提出数，
#   上面的例子就是 7/12；后来的版本不计，是 4/9（`python/sglang/srt/observability/scheduler_metrics_mixin.py`）。
#   只有同一版本的数才能互相比较。
# - SB-38 出现在 sglang（PR #28410）：对预测词元的一次类型转换被挪到了规划用的流上。SB-21 出现在 vllm-ascend（PR #14883）。
#
# ## 练习
#
# **1.** 有份报告说：深度 1 接受 85%，深度 2 接受 80%，深度 3 接受 80%，都是占轮到它们时还有效的草稿。一轮得到多少个词元？

# %% tags=["solution"]
by_depth = list(accumulate([0.85, 0.8, 0.8], mul))  # shares of all rounds
assert abs(1 + sum(by_depth) - 3.074) < 1e-9

# %% [markdown] tags=["en"]
# **2.** With these shares, and 0.8 at every further depth, how many drafts are best for GLM-4.7-Flash with one request,
# and with 64?

# %% [markdown] tags=["zh"] pair="510f22-0ceff7"
# **2.** 按这些比例，更深的每个深度也都是 0.8，GLM-4.7-Flash 在一个请求时用几个草稿最好？64 个请求时呢？

# %% tags=["solution"]
def best_k(batch):
    def at(k):
        return speed(flash, batch, k, 1 + sum(accumulate([0.85] + [0.8] * (k - 1), mul)))
    return max(range(1, 16), key=at)


assert best_k(1) <= 3  # each further draft makes the verification read more experts
assert best_k(64) >= 8  # there it costs next to nothing, as long as weights are the limit

# %% [markdown] tags=["en"]
# **3.** Two requests: one had 9 rounds and kept 3 of 3 drafts in each, the other had one round and kept none. What is the
# acceptance, and what is the mean of the two requests' shares?

# %% [markdown] tags=["zh"] pair="81620c-8d3e6c"
# **3.** 两个请求：一个跑了 9 轮，每轮 3 个草稿全部保留；另一个只跑了一轮，一个也没保留。接受率是多少？两个请求各自的比例再平均，又是多少？

# %% tags=["solution"]
total = Acceptance()
for kept in [3] * 9 + [0]:
    total.add_row(proposed=3, kept=kept)
assert total.rate == 0.9 and (1.0 + 0.0) / 2 == 0.5

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there, and the clinic is for that place above all: a race such as SB-38 needs a device
# with streams. No device has run this chapter yet: see [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="296c4e-c38bb8"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能运行，而且这套检查主要就是为那里准备的：SB-38 那样的竞态，要有带流的设备才会发生。
# 本章还没有在任何设备上运行过，见[哪些在哪里跑过](../what-ran-where.md)。
