# ---
# title:
#   en: "9. MTP: one more layer, many tokens"
#   zh: "9. MTP：多一层，多猜几个词元"
# outcome:
#   en: you can say what every row of an MTP layer means, draft with it by hand, and tell from acceptance when it is fed wrongly
#   zh: 说得出 MTP 层每一行的含义，能亲手用它打草稿，并能从接受率看出它的输入给错了
# minutes: 18
# prerequisites:
#   en: "[chapter 3](ch03_cache.md) (pages and slots), [chapter 6](ch06_glm.md) (what is inside the MTP layer)"
#   zh: "[第 3 章](ch03_cache.md)（页与槽位）、[第 6 章](ch06_glm.md)（MTP 层里面有什么）"
# bugs: [SB-15, SB-16, SB-17, SB-18]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** A decode step reads the model's weights and computes one row for each request. A few rows more cost much
# less than as many steps: the same weights serve them all, though some more experts may be chosen. So if somebody
# guesses the next tokens, the model can check several guesses in one step. GLM-4.7-Flash brings its own guesser: one
# more layer, called *MTP* (multi-token prediction) or *NextN*. [Chapter 6](ch06_glm.md) shows what is inside. This
# chapter runs it.
#
# Some words first. A guessed token is a *draft*, who guesses is the *drafter*, and the model itself is the *target*. To
# *verify* is to run the target over the drafts and keep those that it would have said itself. Wrong drafts never change
# the text; [chapter 11](ch11_lossless.md) says why. They only cost time. So a drafter that is fed wrongly raises no
# error and spoils no text. It shows in one number, the *acceptance*: the share of drafts that are kept.

# %% [markdown] tags=["zh"] pair="58815a-90e1d6"
# **要点。** 解码一步要读一遍模型的权重，却只为每个请求算一行。多算几行，比多走几步便宜得多：
# 几行共用同样的权重，只是选中的专家可能多一些。所以，只要先把后面的词元猜出来，模型就能用一步同时检查好几个。
# GLM-4.7-Flash 自带一个会猜的：多出来的一层，叫 *MTP*（多词元预测），也叫 *NextN*。
# 这一层里面是什么，[第 6 章](ch06_glm.md)已经讲过；本章让它跑起来。
#
# 先说几个词。猜出来的词元叫*草稿*（draft），猜的一方叫*草稿器*（drafter），模型本身叫*目标模型*（target）。
# *验证*（verify）就是让目标模型把草稿跑一遍，留下它自己也会说的那些。
# 草稿猜错不会改变文本，原因见[第 11 章](ch11_lossless.md)，只是白花时间。
# 所以草稿器的输入给错了，既不报错，文本也不坏，只有一个数看得出来：*接受率*，即草稿被保留的比例。

# %%
from trueup.core.sampling import SamplingParams
from trueup.models import LLM
from trueup.models.drafters import make_drafter

llm = LLM.from_pretrained("glm-4.7-flash-nano", progress=False)
nano = llm.model
PROMPTS = [
    "class Stack:\n    def __init__(self, items=None):", "for name in sorted(",
    "import os\nimport sys\n\ndef main(argv):\n", "def read_lines(path):\n",
    "    def test_empty(self):\n        self.", "try:\n    import json\nexcept",
]


def generate(model, drafter=None):
    """The token ids of each prompt's continuation, and the acceptance."""
    run = LLM(model, llm.tokenizer, llm.name, drafter=drafter)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    return [done.token_ids for done in run.generate(PROMPTS, params)], run.acceptance


# %%
plain, _ = generate(nano)
drafted, healthy = generate(nano, make_drafter("mtp", nano, draft_tokens=3))


def show(name, acceptance):
    depths = " ".join(f"{share:.2f}" for share in acceptance.by_depth)
    gain = f"{acceptance.tokens_per_round:.2f} tokens a round"
    print(f"{name:<27} {gain}; kept by depth: {depths}")


show("MTP", healthy)
assert drafted == plain  # the same text
assert healthy.tokens_per_round > 2 and healthy.by_depth[0] > 0.5
assert healthy.by_depth[0] >= healthy.by_depth[2]

# %% [markdown] tags=["en"]
# The first draft of a round is at *depth* 1, the next at depth 2, and so on. In a terminal, `trueup generate --spec mtp
# --draft-tokens 3` does the same.
#
# ## A row, by hand
#
# Let us make a target that fits on paper. Its hidden state is one number $s$ and its vocabulary has 97 tokens. Reading
# token $t_p$ at position $p$ it computes $s_p = s_{p-1} + t_p (p + 1)$ modulo 97, and $s_p$ is also the token that it
# says next. ([`ScriptedModel`][trueup.core.ScriptedModel], which tests the engine, is this model with a cache.)

# %% [markdown] tags=["zh"] pair="de43cf-063c81"
# 一轮里的第一个草稿在*深度* 1，下一个在深度 2，依此类推。在终端里，
# `trueup generate --spec mtp --draft-tokens 3` 做的是同一件事。
#
# ## 一行的含义，用手算
#
# 先造一个纸上就能算的目标模型。它的隐藏状态是一个数 $s$，词表有 97 个词元。在位置 $p$ 读到词元 $t_p$ 时，
# 它算出 $s_p = s_{p-1} + t_p (p + 1)$，对 97 取余；它接下来要说的词元就是 $s_p$。
# （测试引擎用的 [`ScriptedModel`][trueup.core.ScriptedModel] 就是带缓存的这个模型。）

# %%
def target(tokens):
    """The hidden state at every position; it is the token that follows, too."""
    s, rows = 0, []
    for p, t in enumerate(tokens):
        s = (s + t * (p + 1)) % 97
        rows.append(s)
    return rows


prompt = [3, 1, 4, 1]  # positions 0 to 3
h = target(prompt)
assert h == [3, 5, 17, 21]  # so token 4 is 21

# %% [markdown] tags=["en"]
# An MTP layer looks one token further than the target without running it. Its row at position $p$ joins two things that
# are known by now: the target's hidden state $h_p$, which sums up the tokens up to $p$, and the **next** token,
# $t_{p+1}$. It predicts token $p + 2$. In our arithmetic one term is missing, so one addition does it:

# %% [markdown] tags=["zh"] pair="7b29a9-47bf28"
# MTP 层不运行目标模型，就能比它多看一个词元。它在位置 $p$ 的那一行，把此时已知的两样东西合在一起：
# 一是目标模型的隐藏状态 $h_p$，它概括了到 $p$ 为止的词元；二是**下一个**词元 $t_{p+1}$。它预测的是位置 $p + 2$ 的词元。
# 在我们的算术里只差一项，加上就行：

# %%
def mtp(hidden, next_token, p):
    return (hidden + next_token * (p + 2)) % 97


following = [*prompt[1:], h[-1]]  # the prompt shifted by one, and the token just said
f = [mtp(h[p], following[p], p) for p in range(4)]
assert f == [5, 17, 21, 29]
assert f == target([*prompt, h[-1]])[1:]  # what the target says one position further

# %% tags=["fold"]
from trueup.core.picture import boxes

boxes([("position p", list("0123")), ("h of p", [str(x) for x in h]),
       ("token p + 1", [str(x) for x in following]), ("said of token p + 2", [str(x) for x in f])],
      ("Rows of the MTP layer over a prompt. The last one gives the first draft: 29, for position 5.",
       "MTP 层在提示词上的各行。最后一行给出第一个草稿：位置 5 的词元 29。"))

# %% [markdown] tags=["en"]
# Only the last row is a draft. The others are there for their cache rows, which later rows attend to.
#
# ## Several tokens from one layer
#
# The last row's output is more than a guess. It is a hidden state again, that of position 4, and so the same layer can
# take it as input, together with the draft, one position further. That gives the draft for position 6, and so on. One
# layer was trained, and it is used at every depth:

# %% [markdown] tags=["zh"] pair="568243-e6fa58"
# 只有最后一行是草稿。其余各行是为了留下缓存行，后面的行做注意力时要看它们。
#
# ## 一层，猜好几个词元
#
# 最后一行的输出不只是一个猜测，它本身又是一个隐藏状态，即位置 4 的隐藏状态。所以同一层可以把它连同草稿再当作输入，
# 往前走一个位置，得到位置 6 的草稿，如此继续。训练的只有一层，每个深度用的都是它：

# %%
hidden, drafts = f[-1], [f[-1]]
for position in (4, 5):
    hidden = mtp(hidden, drafts[-1], position)  # its own output, its own draft
    drafts.append(hidden)

assert drafts == [29, 9, 72]
assert drafts == target([*prompt, 21, *drafts])[4:7]  # all three are right

# %% [markdown] tags=["en"]
# Three drafts took three runs of the layer: one over the prompt and two of a single row. A trained layer does not add
# numbers but approximates, so some drafts are wrong. The drafts behind a wrong one are lost with it. That is why
# acceptance falls with depth.
#
# ## The same with the nano model
#
# Now with real tensors and a real cache. `run` plans one forward of one request. It runs the target or, if it gets
# hidden rows, the MTP layer. [`plan`][trueup.core.plan] and [`materialise`][trueup.core.materialise] are those of
# chapters [2](ch02_shapes.md) and [3](ch03_cache.md). T counts token rows, H is the hidden width.

# %% [markdown] tags=["zh"] pair="4a16ee-22eec6"
# 三个草稿让这一层跑了三次：一次跑完整个提示词，两次各跑一行。训练出来的层不是做加法，而是做近似，所以总有草稿猜错；
# 一个猜错，排在它后面的也跟着作废。接受率因此随深度下降。
#
# ## 换成 nano 模型
#
# 现在用真实的张量和真实的缓存。`run` 规划一个请求的一次前向，运行目标模型；如果给了隐藏状态，就运行 MTP 层。
# [`plan`][trueup.core.plan] 和 [`materialise`][trueup.core.materialise]
# 就是[第 2 章](ch02_shapes.md)和[第 3 章](ch03_cache.md)里的那两个。T 是词元行数，H 是隐藏维度。

# %%
import torch

from trueup.core import materialise, plan
from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work

# %%
page_ids = PagePool(3, 128)
pools, pages = Pools(nano.cache_spec, page_ids), page_ids.allocate(1)


@torch.inference_mode()
def run(mode, start, tokens, hidden=None):
    """Hidden rows [T, H] of tokens [T] from position start on.

    They are the MTP layer's if it gets the hidden rows [T, H], else the target's.
    """
    work = Work(1, mode, start, len(tokens), pages)
    view = materialise(plan([work], page_size=128), pools)
    ids = torch.tensor(tokens, device=pools.spec.device)  # [T]
    if hidden is None:
        return nano.forward(ids, view, pools)
    return nano.forward_mtp(ids, hidden, view, pools)


def said(hidden):
    return int(nano.logits(hidden[-1:]).argmax())  # after the last row


# %%
ids = llm.tokenizer.encode(PROMPTS[0])
n = len(ids)
h = run(Mode.PREFILL, 0, ids)  # [T, H], after the target's final norm
x = said(h)  # token n: known, but not in the cache yet
f = run(Mode.PREFILL, 0, [*ids[1:], x], h)  # [T, H], after the MTP layer's own norm
drafts = [said(f)]
for position in (n, n + 1):
    f = run(Mode.DRAFT, position, drafts[-1:], f[-1:])  # [1, H]
    drafts.append(said(f))

# %% [markdown] tags=["en"]
# The engine does the same. Its first round runs the prompt, its second drafts and verifies.
# [`Engine.step`][trueup.core.Engine] returns what it drafted:

# %% [markdown] tags=["zh"] pair="337430-635133"
# 引擎做的是同样的事：第一轮跑提示词，第二轮打草稿并验证。[`Engine.step`][trueup.core.Engine] 的返回值里有它打的草稿：

# %%
from trueup.core import Engine, EngineConfig

engine = Engine(nano, drafter=make_drafter("mtp", nano, draft_tokens=3))
request = engine.add(ids, SamplingParams(max_tokens=16))
first, second = engine.step(), engine.step()
assert first.tokens[request] == (x,)
assert second.drafted[request] == tuple(drafts)

# %% [markdown] tags=["en"]
# The MTP layer has attention, so it needs a cache. It gets one more pair of pools beside those of the target's layers,
# with the same page ids, and the row at position $p$ lies **at the same slot** in both. That of the MTP layer holds
# ($h_p$, $t_{p+1}$). We have run the target over n positions, and the MTP layer over two more:

# %% [markdown] tags=["zh"] pair="3064b5-1d9c37"
# MTP 层有注意力，所以也要有缓存。它的一对池子排在目标模型各层的后面，页号相同，位置 $p$ 的行在两边都在**同一个槽位**；
# MTP 层的那一行存的是（$h_p$，$t_{p+1}$）。上面目标模型跑了 n 个位置，MTP 层多跑了两个：

# %%
[page] = pages
own, _ = pools.paged(2)  # [pages, P, R], latents of the target's last layer
extra, _ = pools.paged(3)  # [pages, P, R], of the MTP layer
assert nano.config.num_hidden_layers == 3 and nano.cache_spec.layers == 4
assert own[page, :n].any(-1).all() and not own[page, n:].any()
assert extra[page, : n + 2].any(-1).all() and not extra[page, n + 2 :].any()

# %% [markdown] tags=["en"]
# ## The wrong way: tokens that are not shifted
#
# Row $p$ gets the token of its own position. Everything fits: T tokens, T hidden rows, T positions. By hand:

# %% [markdown] tags=["zh"] pair="5dd63b-91ddb9"
# ## 错误的做法：词元没有移位
#
# 第 $p$ 行拿到的是自己位置上的词元。形状全都对得上：T 个词元、T 行隐藏状态、T 个位置。手算一下：

# %% tags=["raises-exception"] raises="AssertionError" says="[9, 8, 33, 26]"
h_toy = target(prompt)
unshifted = [mtp(h_toy[p], prompt[p], p) for p in range(4)]
assert unshifted == [5, 17, 21, 29], unshifted

# %% [markdown] tags=["en"]
# In trueup the shift happens once, where the engine tells the drafter what the target has decided: `learn` gets the
# rows of a round and for each of them the token that *follows* it. This drafter undoes it. The text is right all the
# same, so we compare acceptance:

# %% [markdown] tags=["zh"] pair="aeb90b-c0dcdf"
# 在 trueup 里，移位只发生在一处，就是引擎把目标模型的决定告诉草稿器的地方：`learn` 收到一轮的各行，
# 每一行都配着它*后面*的那个词元。下面的草稿器把移位抵消掉。文本照样正确，所以我们比接受率：

# %%
from dataclasses import replace

from trueup.core.speculation.chain import ChainDrafter
from trueup.models.drafters import MtpDraft


first_token = {}  # by request: the token at the first row of its next lesson


class Unshifted(ChainDrafter):
    def learn(self, fed):
        own = {f.request: [first_token.get(f.request, 0), *f.next_tokens[:-1]] for f in fed}
        first_token.update({f.request: f.next_tokens[f.kept - 1] for f in fed})
        super().learn([replace(f, next_tokens=own[f.request]) for f in fed])


text, unshifted = generate(nano, Unshifted(MtpDraft(nano), 3))
show("tokens not shifted", unshifted)
assert text == plain

# %% tags=["raises-exception"] raises="AssertionError" says="fed wrongly"
assert unshifted.by_depth[0] > 0.5, "the MTP layer is fed wrongly"

# %% [markdown] tags=["en"]
# ## A mask that tests the position (SB-17)
#
# The reverse mistake: tokens are shifted, and then something is "cleaned up". vLLM's MTP models set the embedding at
# position 0 to zero, with the remark that MTP does not need it ([SB-17](../bugs.md#sb-17), vLLM issue #33299). But the
# token that MTP does not need, $t_0$, is gone with the shift. Position 0 holds $t_1$. With one-hot embeddings:

# %% [markdown] tags=["zh"] pair="06a84f-42b805"
# ## 按位置做的屏蔽（SB-17）
#
# 还有反过来的错误：词元移了位，然后又被“清理”了一遍。vLLM 的 MTP 模型把位置 0 的嵌入置零，注释说 MTP 用不到它
# （[SB-17](../bugs.md#sb-17)，vLLM issue #33299）。可是 MTP 用不到的词元是 $t_0$，它在移位时就已经没了；
# 位置 0 上的是 $t_1$。用独热的嵌入看得最清楚：

# %%
embed = torch.eye(6)  # [V, H]: token t is a 1 in column t
positions = torch.arange(4)  # [T]
shifted = torch.tensor([1, 4, 2, 5])  # [T], tokens t_1 to t_4
embedded = embed[shifted]  # [T, H]
masked = embedded.where(positions[:, None] > 0, 0.0)  # [T, H]
assert embedded[0, 1] == 1 and not masked[0].any()  # t_1 has vanished
assert torch.equal(embedded[1:], masked[1:])


def zero_first(layer, args):
    embedded, hidden, ctx = args
    return embedded.where(ctx.view.positions[:, None] > 0, 0.0), hidden, ctx


hook = nano.mtp[0].register_forward_pre_hook(zero_first)
text, zeroed = generate(nano, make_drafter("mtp", nano, 3))
hook.remove()
show("MTP", healthy)
show("position 0 zeroed", zeroed)
assert text == plain and zeroed.tokens_per_round != healthy.tokens_per_round

# %% [markdown] tags=["en"]
# One row of each prompt is wrong, and these prompts are short. In a long prompt nobody would notice.
#
# ## The order of the join, and the side of the norm (SB-18)
#
# [Chapter 6](ch06_glm.md) swaps the two halves of the projection behind the join and sees agreement vanish. Acceptance
# says the same:

# %% [markdown] tags=["zh"] pair="658050-f9f0c0"
# 每个提示词只错一行，而这里的提示词都很短。提示词一长，就没有人会发现了。
#
# ## 拼接的顺序，归一化的哪一侧（SB-18）
#
# [第 6 章](ch06_glm.md)把拼接后面那个投影的两半对调，猜对的就几乎没有了。看接受率也一样：

# %%
eh, H = nano.mtp[0].eh, nano.config.hidden_size  # [H, 2H]
eh.copy_(eh.roll(H, dims=1))  # hidden half first
text, swapped = generate(nano, make_drafter("mtp", nano, 3))
eh.copy_(eh.roll(H, dims=1))  # put back
show("join swapped", swapped)
assert text == plain and swapped.by_depth[0] < 0.2

# %% [markdown] tags=["en"]
# The other half of [SB-18](../bugs.md#sb-18): is the hidden state taken before or after the target's final norm? A
# drafter's `taps` says what it wants to see. `()` means the rows after the final norm; `(3,)` means the rows that would
# enter a layer 3, that is, those before it. Let us take the wrong side:

# %% [markdown] tags=["zh"] pair="e56c77-dc6827"
# [SB-18](../bugs.md#sb-18) 的另一半：隐藏状态取自目标模型最终归一化之前，还是之后？草稿器用 `taps` 说明它要看什么：
# `()` 是最终归一化之后的行；`(3,)` 是将要进入第 3 层的行，也就是归一化之前的行。我们取错误的一侧：

# %%
class BeforeTheNorm(MtpDraft):
    taps = (3,)


text, before = generate(nano, ChainDrafter(BeforeTheNorm(nano), 3))
show("before the norm", before)
assert text == plain
assert abs(before.by_depth[0] - healthy.by_depth[0]) < 0.1  # no harm at all

# %% [markdown] tags=["en"]
# No harm! An RMS norm divides a row by its size and multiplies channel by channel with weights. The MTP layer begins
# with a norm of its own, `hnorm`, so the division makes no difference, and the nano model's weights are much alike. A
# real checkpoint's need not be: for GLM-5.2 a report (ROCm/ATOM PR #1742) has them from -0.07 to 1.81. So **this
# checkpoint cannot decide the question**, and a test with it would pass on both sides.
#
# A checkpoint that can is quickly made. Multiply half of the channels of the normed state by 4, the others by 1/4, and
# divide by the same numbers wherever it is read. The target stays the same, and the MTP layer very nearly:

# %% [markdown] tags=["zh"] pair="5b7b8d-cb1073"
# 毫无影响！RMS 归一化先把一行除以它的大小，再逐通道乘上权重。MTP 层的开头自己有一个归一化 `hnorm`，所以除不除没有差别；
# 而 nano 模型的这些权重彼此又很接近。真实的检查点未必如此：有报告说（ROCm/ATOM PR #1742），GLM-5.2 的权重从 -0.07 到 1.81。
# 所以**这个检查点判断不了这个问题**，拿它做测试，两侧都会通过。
#
# 能判断的检查点不难造。把归一化后的状态的一半通道乘以 4，另一半乘以 1/4，在读它的地方再除以同样的数。目标模型分毫不差，MTP 层也几乎不变：

# %%
import copy

spread = copy.deepcopy(nano)
generator = torch.Generator().manual_seed(0)
s = torch.where(torch.rand(H, generator=generator) < 0.5, 0.25, 4.0)  # [H]
s = s.to(nano.embed.device)
layer = spread.mtp[0]
for norm in (spread.norm, layer.norm):
    norm.weight.mul_(s)
spread.lm_head.div_(s)
layer.h_norm.weight.mul_(s.square().mean().sqrt() / s)  # hnorm sees rows so much larger

low, high = nano.norm.weight.min(), nano.norm.weight.max()
assert low > 0 and high / low < 2
text, same = generate(spread, make_drafter("mtp", spread, 3))
show("spread weights", same)
assert text == plain and same.by_depth[0] > 0.5

# %% tags=["raises-exception"] raises="AssertionError" says="wrong side of the norm"
text, before = generate(spread, ChainDrafter(BeforeTheNorm(spread), 3))
show("spread, before the norm", before)
assert text == plain
assert before.by_depth[0] > 0.5, "wrong side of the norm"

# %% [markdown] tags=["en"]
# There is a second place for the same mistake: what the layer hands to its own next step. The MTP layer hands on what
# left its norm. If it hands on what went in, the first draft is as good as ever and the others collapse. This happened
# to GLM-5 in vLLM: behind the first draft, acceptance fell to about 10% (PR #46075; PR #47448 hands on the normed
# state).

# %% [markdown] tags=["zh"] pair="421bf4-26f0d6"
# 同样的错误还可能出现在第二处：这一层交给自己下一步的是什么。MTP 层交出的是归一化之后的行。
# 如果交出的是归一化之前的行，第一个草稿照样准，后面的却一落千丈。GLM-5 在 vLLM 上就出过这样的事：
# 第一个草稿之后，接受率掉到 10% 左右（PR #46075；PR #47448 改为交出归一化后的状态）。

# %%
class HandsOnBeforeTheNorm(MtpDraft):
    def forward(self, *args):
        # Takes the weights off again.  The division by the row's size stays: hnorm divides anyway.
        return super().forward(*args) / self.target.mtp[0].norm.weight  # [Tp, H]

    def logits(self, hidden):
        return super().logits(hidden * self.target.mtp[0].norm.weight)  # [B, V]


text, fed_back = generate(spread, ChainDrafter(HandsOnBeforeTheNorm(spread), 3))
show("spread, handed on before it", fed_back)
assert text == plain
assert fed_back.by_depth[0] > 0.5 and fed_back.by_depth[1] < 0.3

# %% [markdown] tags=["en"]
# Public reports contradict each other on the side of the norm, even for one model. For DeepSeek and GLM, llama.cpp PR
# #24025 says before, ATOM and sglang say after. A convention like this is written down for each checkpoint and pinned
# by a number from its own reference.
#
# ## A prompt in chunks
#
# Long prompts are processed in chunks. The last row of a chunk needs the token after it, too. At the end of the
# *prompt* that is the token just sampled. At the end of any other chunk it is the next **prompt** token: what the
# target would say there does not matter, for the text is given. Let us listen to what the engine hands over:

# %% [markdown] tags=["zh"] pair="e5e9fc-a3c939"
# 归一化的哪一侧，公开的说法互相矛盾，连同一个模型也是：关于 DeepSeek 和 GLM，llama.cpp PR #24025 说是之前，
# ATOM 和 sglang 说是之后。这类约定要按检查点写明，并用它自己的参考实现算出的数值固定下来。
#
# ## 分块的提示词
#
# 长提示词分块处理。一块的最后一行也要配上它后面的词元。在*提示词*末尾，那是刚采样出的词元；
# 在其他各块的末尾，那是**提示词**的下一个词元：文本是给定的，目标模型在那里会说什么无关紧要。听听引擎交过去的是什么：

# %%
class Listening(ChainDrafter):
    def learn(self, fed):
        heard.extend(list(f.next_tokens) for f in fed)
        super().learn(fed)


heard = []
chunked = [(37 * i + 11) % 2000 for i in range(20)]  # no text: nobody could guess it
engine = Engine(nano, EngineConfig(prefill_tokens=8), Listening(MtpDraft(nano), 3))
request = engine.add(chunked, SamplingParams(max_tokens=8))
rounds = [engine.step() for _ in range(3)]
(token,) = rounds[2].tokens[request]
assert heard == [chunked[1:9], chunked[9:17], [*chunked[17:], token]]

# %% [markdown] tags=["en"]
# The wrong way takes a sample after every chunk. Then some cache rows of the MTP layer belong to another text: those
# where chunks end.

# %% [markdown] tags=["zh"] pair="c33f12-23a8be"
# 错误的做法是每块末尾都采样一个词元。这样，MTP 层的某些缓存行就属于另一段文本了：正是各块末尾的那些行。

# %%
class Guessing(ChainDrafter):
    def learn(self, fed):
        [f] = fed
        guess = int(nano.logits(f.features[-1:]).argmax())
        super().learn([replace(f, next_tokens=[*f.next_tokens[:-1], guess])])


def mtp_rows(drafter, chunk):
    """Latents [T, R] of the MTP layer when the prompt is done."""
    engine = Engine(nano, EngineConfig(prefill_tokens=chunk), drafter)
    engine.add(chunked, SamplingParams(max_tokens=8))
    while not engine.step().tokens:
        pass
    return engine.pools.paged(3)[0][1, : len(chunked)]  # page 1 is given out first


whole = mtp_rows(ChainDrafter(MtpDraft(nano), 3), 20)
chunks = mtp_rows(ChainDrafter(MtpDraft(nano), 3), 8)
torch.testing.assert_close(chunks, whole, rtol=1e-4, atol=1e-4)
wrong = mtp_rows(Guessing(MtpDraft(nano), 3), 8)
differ = ((wrong - whole).abs().amax(-1) > 1e-2).nonzero().flatten().tolist()
assert differ == [7, 15]

# %% [markdown] tags=["en"]
# ## At the end of the context (SB-16)
#
# A drafter runs ahead, and near the limit it runs past it. In [SB-16](../bugs.md#sb-16) the model has 16 positions in
# pages of 4, and the drafts stand at 15, 16 and 17. Setting the bad ones to 0 avoids a crash. But position 0 has a row:

# %% [markdown] tags=["zh"] pair="374847-03beb4"
# ## 上下文的尽头（SB-16）
#
# 草稿器总是跑在前面，到了上限附近就会越界。[SB-16](../bugs.md#sb-16) 里，模型有 16 个位置，一页 4 个，草稿在 15、16、17。
# 把越界的位置改成 0，崩溃是没有了，可位置 0 上已经有一行：

# %%
table = [3, 5, 2, 7]  # the request's pages
clamped = [p if p < 16 else 0 for p in (15, 16, 17)]
slots = [table[p // 4] * 4 + p % 4 for p in clamped]
assert slots == [31, 12, 12] and table[0] * 4 == 12  # twice over the row of position 0

# %% [markdown] tags=["en"]
# trueup drops such drafts before they are made. A request that could outgrow the model is refused when it is added. A
# round yields one token more than the drafts that it keeps, so a request with `left` tokens to go is asked for at most
# `left - 1` drafts. The drafter finds the number as `most` in its turn. Here is one that ignores it:

# %% [markdown] tags=["zh"] pair="89b0e3-9b801d"
# trueup 的办法是根本不打这样的草稿。一个请求如果可能超出模型的上限，加入时就被拒绝。
# 一轮得到的词元比保留的草稿多一个，所以一个还差 `left` 个词元的请求，最多打 `left - 1` 个草稿；
# 这个数就是草稿器每次收到的 `most`。下面这个草稿器不理会它：

# %%
from trueup.core import ScriptedModel
from trueup.core.scripted import ScriptedDraftModel


class Unlimited(ChainDrafter):
    def propose(self, turns):
        return super().propose([replace(turn, most=99) for turn in turns])


def near_the_end(drafter):
    model = ScriptedModel(max_positions=16)
    drafter = drafter(ScriptedDraftModel(model), 3)
    engine = Engine(model, EngineConfig(page_size=4), drafter)
    request = engine.add([3] * 13, SamplingParams(max_tokens=3))
    engine.step()  # the prompt
    return engine, request


# %% tags=["raises-exception"] raises="ValueError" says="17 tokens do not fit its 4 pages of 4"
engine, request = near_the_end(Unlimited)
engine.step()

# %%
engine, request = near_the_end(ChainDrafter)
before = engine.pools.latent[0][1:5].flatten()[:13].clone()  # its pages are 1 to 4
done = engine.step()
assert len(done.drafted[request]) == 1  # two to go: a draft, and the token behind it
assert done.finished == {request: "length"} and set(done.layout.positions) == {13, 14}
assert torch.equal(engine.pools.latent[0][1:5].flatten()[:13], before)

# %% [markdown] tags=["en"]
# The last token is never run, so position 15 stays empty. In [SB-15](../bugs.md#sb-15) another capacity was too small:
# a rotary table with one row for each prompt token and each step. But a step with drafts commits several tokens. With
# 10 prompt tokens, 6 steps, one draft and every draft kept:

# %% [markdown] tags=["zh"] pair="caa6d3-3111e2"
# 最后一个词元不会再跑，所以位置 15 是空的。[SB-15](../bugs.md#sb-15) 里不够大的是另一样东西：旋转位置表，
# 提示词的每个词元一行，每一步再一行。但有了草稿，一步会提交好几个词元。提示词 10 个词元，走 6 步，一个草稿，且个个被保留：

# %% tags=["raises-exception"] raises="IndexError" says="out of bounds for dimension 0 with size 16"
model = ScriptedModel(max_positions=23)
drafter = ChainDrafter(ScriptedDraftModel(model), 1)
engine = Engine(model, EngineConfig(page_size=4), drafter)
engine.add([2] * 10, SamplingParams(max_tokens=13))
rounds = []
while engine.has_work:
    rounds.append(engine.step())
assert len(rounds) == 1 + 6 and all(done.accepted.get(1, 1) == 1 for done in rounds)
angles = torch.zeros(10 + 6, 4)  # [rows, Dr]
angles[list(rounds[-1].layout.positions)]

# %% [markdown] tags=["en"]
# The bound that holds counts tokens, not steps: prompt and `max_tokens` together. It is the one that a request is
# admitted by.

# %% [markdown] tags=["zh"] pair="242e72-9df337"
# 站得住的上限按词元数算，不按步数算：提示词加 `max_tokens`。请求能不能加入，依据的就是它。

# %%
assert max(p for done in rounds for p in done.layout.positions) == 21 < 10 + 13

# %% tags=["raises-exception"] raises="ValueError" says="need 24 positions; the model has 23"
engine.add([2] * 10, SamplingParams(max_tokens=14))

# %% [markdown] tags=["en"]
# ## Built on its own
#
# The MTP layer is a model without an outer model: no embedding, no head, those are the target's. In some engines it is
# built without the outer constructor and then misses a config value that only this constructor sets
# ([SB-30](../bugs.md#sb-30), in [chapter 6](ch06_glm.md)). Here the config is complete before any module exists, so the
# layer can be built alone:

# %% [markdown] tags=["zh"] pair="3c6674-eaf044"
# ## 单独构造
#
# MTP 层是一个没有外层模型的模型：嵌入和 `lm_head` 都是目标模型的。有些引擎构造它时不经过外层的构造函数，
# 于是缺了只有那个构造函数才会设置的配置值（[SB-30](../bugs.md#sb-30)，见[第 6 章](ch06_glm.md)）。
# 这里的配置在任何模块出现之前就已经完整，所以这一层可以单独构造：

# %%
from trueup.models.glm4_moe_lite import MtpLayer

settled = copy.deepcopy(nano.config)
alone = MtpLayer(nano.config, layer=3)
missing, unexpected = alone.load_state_dict(nano.mtp[0].state_dict())
assert not missing and not unexpected and nano.config == settled
parts = {name.split(".")[0] for name, _ in alone.named_parameters()}
assert parts == {"eh", "e_norm", "h_norm", "decoder", "norm"}  # no embedding, no head

# %% [markdown] tags=["en"]
# ## What engines do
#
# - sglang runs an MTP layer by its EAGLE code ([chapter 10](ch10_eagle.md)): shifted tokens, unshifted positions, the
#   normed state handed on (`python/sglang/srt/models/deepseek_nextn.py`).
# - vLLM, which vllm-ascend builds on, shifts tokens and leaves positions alone, too. Some of its MTP models have the
#   mask at position 0.
# - transformers gives each MTP layer one token to draft and numbers its rows $p + 1$ (exercise 3).
# - The CANN recipes run the one layer over the whole window again for each draft: simpler shapes, more arithmetic.
#
# ## Exercises
#
# **1.** How many forwards of the MTP layer does a round have for k drafts?

# %% [markdown] tags=["zh"] pair="2de2b7-7082cd"
# ## 真实引擎怎么做
#
# - sglang 用它的 EAGLE 代码运行 MTP 层（[第 10 章](ch10_eagle.md)）：词元移位，位置不移，交出归一化后的状态
#   （`python/sglang/srt/models/deepseek_nextn.py`）。
# - vLLM 同样是词元移位、位置不动，vllm-ascend 建立在它之上。它的一些 MTP 模型带有位置 0 的那个屏蔽。
# - transformers 让每个 MTP 层只猜一个词元，并把它的行编号为 $p + 1$（练习 3）。
# - CANN recipes 每猜一个词元，就让这一层把整个窗口重跑一遍：形状简单些，计算多些。
#
# ## 练习
#
# **1.** 打 k 个草稿，一轮里 MTP 层要做几次前向？

# %% [markdown] tags=["en", "solution"]
# k: one over the rows that the target has just verified, which yields the first draft of the next round, and k - 1 of
# one row.

# %% [markdown] tags=["zh", "solution"] pair="f4739e-04acfb"
# k 次：一次跑目标模型刚验证过的那些行，得到下一轮的第一个草稿；另外 k - 1 次各跑一行。

# %% tags=["solution"]
for k in (1, 2, 4):
    engine = Engine(nano, drafter=make_drafter("mtp", nano, k))
    engine.add(ids, SamplingParams(max_tokens=16, ignore_eos=True))
    engine.step()
    assert len(engine.step().draft_layouts) == k

# %% [markdown] tags=["en"]
# **2.** Suppose every draft step gets the target's hidden state again, and not the layer's own output. Which drafts are
# right in the toy model?

# %% [markdown] tags=["zh"] pair="c87639-13a65a"
# **2.** 假如每个草稿步拿到的都还是目标模型的隐藏状态，而不是这一层自己的输出，玩具模型里哪些草稿是对的？

# %% tags=["solution"]
h_toy, right = target(prompt), [29, 9, 72]
stuck = [mtp(h_toy[3], 21, 3)]
for position in (4, 5):
    stuck.append(mtp(h_toy[3], stuck[-1], position))
assert stuck[0] == right[0] and stuck[1] != right[1]  # the first only

# %% [markdown] tags=["en"]
# **3.** transformers numbers the rows of an MTP layer $p + 1$, trueup numbers them $p$. Show on the nano model that the
# drafts are the same. Why?

# %% [markdown] tags=["zh"] pair="3c2054-866682"
# **3.** transformers 把 MTP 层的行编号为 $p + 1$，trueup 编号为 $p$。用 nano 模型说明两者的草稿相同。为什么？

# %% [markdown] tags=["en", "solution"]
# Rope turns queries and keys by their positions, and a score depends on the difference of the two only. All rows of
# this layer move together.

# %% [markdown] tags=["zh", "solution"] pair="f2b68a-af4dde"
# rope 按位置旋转查询和键，注意力分数只取决于两者位置之差。而这一层的所有行是一起挪动的。

# %% tags=["solution"]
with torch.inference_mode():
    view = materialise(plan([Work(1, Mode.PREFILL, 0, n, pages)], page_size=128), pools)
    following = torch.tensor([*ids[1:], x], device=pools.spec.device)  # [T]
    f = nano.forward_mtp(following, h, view, pools)  # [T, H]
    further = replace(view, positions=view.positions + 1)
    moved = nano.forward_mtp(following, h, further, pools)  # [T, H]
torch.testing.assert_close(moved, f, rtol=1e-3, atol=1e-3)

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there. In bfloat16 some drafts near a tie may change, and acceptance with them. No
# device has run this chapter yet: see [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="835c00-409773"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能运行。用 bfloat16 时，得分几乎相等的草稿可能会变，接受率也跟着变。
# 本章还没有在任何设备上运行过，见[哪些在哪里跑过](../what-ran-where.md)。
