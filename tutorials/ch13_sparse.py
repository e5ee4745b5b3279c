# ---
# title:
#   en: "13. Sparse attention: choose, then attend"
#   zh: "13. 稀疏注意力：先选位置，再算注意力"
# outcome:
#   en: an indexer and sparse attention by hand, equal to the two operators, and an eye for what a trained indexer chooses
#   zh: 亲手写出索引器和稀疏注意力，与两个算子的结果一致，并看懂训练好的索引器选了什么
# minutes: 20
# prerequisites:
#   en: "[chapter 5](ch05_mla.md) (absorbed MLA, latents) and [chapter 4](ch04_operators.md) (contracts)"
#   zh: "[第 5 章](ch05_mla.md)（吸收式 MLA、潜变量）和[第 4 章](ch04_operators.md)（契约）"
# bugs: [SB-28, SB-29]
# hardware:
#   en: any laptop; the same cells are meant for an NPU machine
#   zh: 任何笔记本电脑；同样的单元格按设计也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** With dense attention, a token looks at every token before it. After 131,072 tokens, each layer of
# GLM-5 reads 131,072 latents for the next one, and nearly all of them get next to no weight. *DSA* (DeepSeek sparse
# attention; DeepSeek-V3.2, GLM-5) first **chooses**: a *lightning indexer* reads a short *index key* of every token,
# gives it a score, and keeps the best 2,048 positions. Then it **attends**, to those alone. These are two operators, and
# what goes from one to the other is a tensor of positions, the *top-k positions*.
#
# We build both on eight tokens, then look at what a trained indexer chooses. [Chapter 14](ch14_two_batches.md) asks whose
# rows such a tensor holds, and [chapter 15](ch15_train_indexer.md) trains an indexer.

# %% [markdown] tags=["zh"] pair="ffbb84-842237"
# **要点。** 稠密注意力里，每个词元都要看它前面的全部词元。上下文有 131,072 个词元时，GLM-5 每生成一个词元，
# 每一层都要读 131,072 个潜变量，而其中绝大多数分到的权重几乎为零。
# *DSA*（DeepSeek 稀疏注意力，用于 DeepSeek-V3.2 和 GLM-5）先**选**：*lightning indexer*（闪电索引器）读每个词元的一个很短的*索引键*，
# 给它打分，留下得分最高的 2,048 个位置；然后再**算**：只对这些位置做注意力。这是两个算子，前一个交给后一个的，是一个存放位置的张量，即 *top-k 位置*。
#
# 我们先在八个词元上亲手写出这两步，再看训练好的索引器选了什么。这个张量的每一行属于谁，见[第 14 章](ch14_two_batches.md)；
# 索引器怎样训练，见[第 15 章](ch15_train_indexer.md)。

# %% tags=["fold"]
from trueup.core.picture import boxes

tokens = ["def", "f", "(", "a", ")", ":", "del", "a"]
read = [token if place in (1, 3, 7) else ("", "pad") for place, token in enumerate(tokens)]
boxes([("index keys", tokens), ("latents", read)],
      ("What the row of the last token reads, with K = 3: "
       "all of the small index keys, three of the large latents.",
       "最后一个词元的那一行要读什么（K = 3）：索引键小，全部要读；潜变量大，只读三个。"))

# %% [markdown] tags=["en"]
# ## The indexer, on eight tokens
#
# The indexer is an attention of its own, small and without values. It has `Ni` query heads of width `Di`, and one key a
# token. For query row $t$ and key $s$, summed over its heads $h$:
#
# $$\mathrm{score}_{t,s} = \sum_h w_{t,h}\,\mathrm{relu}(q_{t,h} \cdot k_s)$$
#
# The weights $w$ come from the row's hidden state. Nothing keeps them positive. There is no softmax: only the order of
# scores counts.
#
# Let an index key hold two numbers: how much a token is like a name, and how much like a bracket. Every row asks about
# both, each head about one. Rows of names want names and no brackets, other rows the reverse.

# %% [markdown] tags=["zh"] pair="af8c18-d54474"
# ## 在八个词元上手写索引器
#
# 索引器自己就是一个小小的注意力，只是没有值。它有 `Ni` 个宽度为 `Di` 的查询头，每个词元一个键。
# 键 $s$ 在查询行 $t$ 上的得分，由各个头 $h$ 相加而得：
#
# $$\mathrm{score}_{t,s} = \sum_h w_{t,h}\,\mathrm{relu}(q_{t,h} \cdot k_s)$$
#
# 权重 $w$ 由这一行的隐藏状态算出，不保证是正数。这里没有 softmax：只看得分的高低次序。
#
# 设索引键由两个数组成：这个词元有多像名字，有多像括号。每一行都问这两个问题，一个头问一个。
# 名字所在的行想要名字、不要括号，其余各行正相反。

# %%
import torch
import torch.nn.functional as F
import trueup.core
from torch.testing import assert_close

device = "npu" if trueup.core.load().name == "device" else "cpu"
key = torch.tensor([[-2.0, -3], [3, -1], [-1, 4], [5, -2],
                    [-1, 3], [-2, 2], [-2, -9], [6, -2]])  # [S, Di]: name, bracket
query = torch.eye(2).expand(8, 2, 2)  # [T, Ni, Di]: one question a head
weights = torch.tensor([[1.0, -1] if token in ("f", "a") else [-1, 1]
                        for token in tokens])  # [T, Ni]

# %%
T, K = 8, 3
later = torch.ones(T, T, dtype=torch.bool).triu(1)  # [T, S]: not to be seen


def best(score, K):
    """By row, the positions of its K highest scores, best first; then -1."""
    visible = score.masked_fill(later, -torch.inf)  # [T, S]
    order = visible.argsort(-1, descending=True).tolist()  # T rows of S
    return [row[: min(K, t + 1)] + [-1] * (K - t - 1) for t, row in enumerate(order)]


dots = torch.einsum("thd,sd->ths", query, key)  # [T, Ni, S]
score = torch.einsum("th,ths->ts", weights, dots.relu())  # [T, S]
chosen = best(score, K)
assert score[7].tolist() == [0, 3, -4, 5, -3, -2, 0, 6]
assert chosen[7] == [7, 3, 1] and chosen[4] == [2, 4, 0] and chosen[0] == [0, -1, -1]

# %% tags=["fold"]
table = [("", tokens)]
for t, row in enumerate(chosen):
    cells = [(f"{int(score[t, s])}", "real" if s in row else "pad") for s in range(t + 1)]
    table.append((tokens[t], cells))
boxes(table, ("Scores of each row; solid boxes are chosen (K = 3). "
              "A row sees no key after itself.",
              "每一行的得分，实线框是选中的（K = 3）。一行看不到排在自己后面的键。"))

# %% [markdown] tags=["en"]
# Row 4, `)`, wants brackets: it takes `(`, itself, and third `def` with score 0, ahead of the names, which have negative
# weight. A key that no head likes scores exactly 0.
#
# The operator does the same over paged keys. It wants keys 128 wide: added zeros change no dot product.
# [`audit`][trueup.core.audit] checks the call by a device's rules.

# %% [markdown] tags=["zh"] pair="5a5910-edec93"
# 第 4 行 `)` 想要括号：它选了 `(` 和自己，第三个是得 0 分的 `def`，因为名字的权重是负的，得分更低。
# 哪个头都不喜欢的键，得分恰好是 0。
#
# 算子对分页的键做同样的事。它要求键宽 128，那就补零，点积不变。[`audit`][trueup.core.audit] 按设备的规则检查这次调用。

# %%
def bf16(x):
    return x.to(device, torch.bfloat16).contiguous()


def int32(x):
    return torch.tensor(x, dtype=torch.int32, device=device)


def paged(x):
    """Rows [S, D] in page 1 of [pages, P, 1, D]; page 0 is the dummy page."""
    pages = x.new_zeros(2, 16, 1, x.shape[1])
    pages[1, : len(x), 0] = x
    return bf16(pages)


# %%
def indexer(query, key, weights, K):
    """The same positions, from the operator: one request, as many rows as keys."""
    wide = (0, 128 - key.shape[1])
    positions, _ = torch.ops.npu.npu_lightning_indexer(
        bf16(F.pad(query, wide)), paged(F.pad(key, wide)), bf16(weights),
        actual_seq_lengths_query=int32([len(query)]),
        actual_seq_lengths_key=int32([len(key)]),
        block_table=int32([[1]]), layout_query="TND", layout_key="PA_BSND",
        sparse_count=K, sparse_mode=3)  # [T, 1, K]
    return positions[:, 0].tolist()


with trueup.core.audit() as calls:
    assert indexer(query, key, weights, K) == chosen
assert calls.checked["npu_lightning_indexer"] == 1

# %% [markdown] tags=["en"]
# ## The wrong way: weights before ReLU
#
# "Weigh each dot product, cut at zero, add up" reads as well as the right order. Shapes are equal, and wherever the
# weight is positive, the numbers are equal, too.

# %% [markdown] tags=["zh"] pair="c7fee8-48ffed"
# ## 错误的做法：先乘权重，后做 ReLU
#
# “每个点积先乘权重，截掉负数，再相加”，读起来和正确的次序一样顺。形状一样；只要权重是正的，数也一样。

# %%
def weights_first(weights):
    return (weights[..., None] * dots).relu().sum(1)  # [T, S]


right = torch.einsum("th,ths->ts", weights.abs(), dots.relu())  # [T, S]
assert torch.equal(weights_first(weights.abs()), right)

# %% tags=["raises-exception"] raises="AssertionError" says="[6, 7, 3]"
row = best(weights_first(weights), K)[7]
assert row == [7, 3, 1], row

# %% [markdown] tags=["en"]
# Row 7 now ranks `del` first. That key has -9 for brackets, and the row's weight for brackets is -1. In the right order
# ReLU says "no bracket, so nothing to hold against it". In the wrong one, minus times minus makes it the best key of all.
#
# ReLU cuts at zero, so it matters where a key's zero lies. A model's index keys come out of a LayerNorm, with weight
# and bias; all its other norms are RMSNorms. LayerNorm subtracts the mean: what all numbers of a key have in common
# vanishes.

# %% [markdown] tags=["zh"] pair="047bbd-520e5b"
# 这样一来，第 7 行把 `del` 排在第一。这个键在“像括号”上是 -9，而这一行对括号的权重是 -1。
# 次序正确时，ReLU 的意思是“不是括号，不扣分”；次序反了，负负得正，它成了得分最高的键。
#
# ReLU 在零处截断，所以键的零点在哪里很要紧。这些模型的其他归一化都是 RMSNorm，唯独索引键用带权重和偏置的 LayerNorm。
# LayerNorm 会减去均值：一个键里各个数共有的部分就消失了。

# %%
from trueup.core.layers.layer_norm import LayerNorm

norm = LayerNorm(4, eps=1e-6)
raw = torch.tensor([[1.0, 3, 5, 11]])  # [S, Di], before the norm
assert_close(norm(raw + 100), norm(raw), atol=1e-4, rtol=0)
assert (norm(raw) < 0).sum() == 2  # below the mean
assert (F.rms_norm(raw, (4,)) > 0).all()  # RMSNorm leaves ReLU nothing to cut

# %% [markdown] tags=["en"]
# The bias can then move zero to where training wants it.
#
# ## Fewer tokens than K (SB-29)
#
# K is a constant, 2,048, and a request begins with one token. PyTorch's `topk` refuses ([SB-29](../bugs.md#sb-29), NeMo
# Automodel PR #3035):

# %% [markdown] tags=["zh"] pair="15e420-2822ad"
# 偏置还可以把零点移到训练所需的位置。
#
# ## 词元不足 K 个（SB-29）
#
# K 是常数 2,048，而请求总是从一个词元开始的。PyTorch 的 `topk` 会直接报错
# （[SB-29](../bugs.md#sb-29)，NeMo Automodel PR #3035）：

# %% tags=["raises-exception"] raises="RuntimeError" says="out of range"
score[4, :5].topk(8)

# %% [markdown] tags=["en"]
# The operator's answer is always K wide. A row that sees fewer keys has all of them, and -1 behind:

# %% [markdown] tags=["zh"] pair="7fac57-ba74f5"
# 算子的结果，宽度总是 K。一行能看到的键不足 K 个时，全部列出，后面填 -1：

# %%
short = indexer(query[:5], key[:5], weights[:5], K=8)
assert short[0] == [0, -1, -1, -1, -1, -1, -1, -1]
assert sorted(short[4][:5]) == [0, 1, 2, 3, 4] and short[4][5:] == [-1, -1, -1]

# %% [markdown] tags=["en"]
# ## Attend
#
# Now `npu_sparse_flash_attention`: absorbed MLA over the chosen positions. Latents `[S, R]` and rope keys `[S, Dr]` lie
# in pages, and `sparse_indices` has one row of positions for each query row. By hand it is dense attention under a mask
# that shows the chosen positions only.

# %% [markdown] tags=["zh"] pair="125c7a-a6c0da"
# ## 算注意力
#
# 接着是 `npu_sparse_flash_attention`：对选中的位置做吸收式 MLA。潜变量 `[S, R]` 和 rope 键 `[S, Dr]` 在页里，
# `sparse_indices` 为每一行查询给出一行位置。手写的话，就是稠密注意力加一个只露出选中位置的掩码。

# %%
torch.manual_seed(0)
N, R, Dr, scale = 2, 512, 64, 1 / 16
latent, rope = bf16(torch.randn(T, R)), bf16(torch.randn(T, Dr))  # [S, R], [S, Dr]
q_latent = bf16(torch.randn(T, N, R))  # [T, N, R]
q_rope = bf16(torch.randn(T, N, Dr))  # [T, N, Dr]


def attend(rows):
    out, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        q_latent, paged(latent), paged(latent), int32(rows)[:, None], scale,
        query_rope=q_rope, key_rope=paged(rope), block_table=int32([[1]]),
        actual_seq_lengths_query=int32([T]), actual_seq_lengths_kv=int32([T]),
        layout_query="TND", layout_kv="PA_BSND", sparse_mode=3, attention_mode=2)
    return out  # [T, N, R]


def masked_dense(rows):
    out_of_sight = torch.ones(T, T, dtype=torch.bool, device=device)  # [T, S]
    for t, row in enumerate(rows):
        out_of_sight[t, [place for place in row if place >= 0]] = False
    score = torch.einsum("tnr,sr->tns", q_latent.float(), latent.float())  # [T, N, S]
    score += torch.einsum("tnd,sd->tns", q_rope.float(), rope.float())  # [T, N, S]
    score = (scale * score).masked_fill(out_of_sight[:, None], -torch.inf)  # [T, N, S]
    return torch.einsum("tns,sr->tnr", score.softmax(-1), latent.float())  # [T, N, R]


# %%
def same(ours, wanted):
    assert_close(ours.float(), wanted, rtol=2e-2, atol=2e-2)


with trueup.core.audit() as calls:
    same(attend(chosen), masked_dense(chosen))
assert calls.checked["npu_sparse_flash_attention"] == 1

everything = best(score, 8)  # K = 8: enough for every row
causal = [list(range(t + 1)) for t in range(T)]
same(attend(everything), masked_dense(causal))  # equals dense attention
assert torch.equal(latent[chosen[0][-1]], latent[7])  # what -1 means to PyTorch

# %% [markdown] tags=["en"]
# So -1 is an end mark, not a position. Used as an index in PyTorch it is the last token, which row 0 must not see. And it
# has to stay at the end. Suppose somebody sorts the positions, so that memory is read in order: -1 comes to the front.

# %% [markdown] tags=["zh"] pair="713db6-d60043"
# 所以 -1 是结束标记，不是位置。在 PyTorch 里拿它当下标，取到的是最后一个词元，第 0 行不该看到它。
# 而且它必须留在末尾。假如有人为了顺序读内存把位置排了序，-1 就跑到了最前面：

# %% tags=["raises-exception"] raises="ContractError" says="SB-29"
with trueup.core.audit():
    attend([sorted(row) for row in chosen])

# %% [markdown] tags=["en"]
# Such a row could come out as zeros on one kernel and right on another, so the contract refuses it. The order of
# positions *before* the -1 is free (exercise 3).
#
# ## What a trained indexer chooses
#
# `glm-5-nano` is the nano model of the earlier chapters with an indexer in each layer, 16 heads and K = 64, and a little
# more training. We run it over 512 tokens of `base64.py`, from the standard library. The file was held out from training.

# %% [markdown] tags=["zh"] pair="8ba75a-f6bb7e"
# 这样的一行，在一种内核上可能得到全零，在另一种上却是对的，所以契约拒绝它。-1 *之前*的位置怎么排都行（练习 3）。
#
# ## 训练好的索引器选了什么
#
# `glm-5-nano` 就是前几章的 nano 模型，每层加了一个索引器（16 个头，K = 64），又稍加训练。
# 我们让它跑一遍标准库 `base64.py` 的 512 个词元，训练时没有用过这个文件。

# %%
import base64
import inspect

from trueup.core import materialise, plan
from trueup.core.cache import Pools
from trueup.core.layout import Mode
from trueup.core.pages import PagePool
from trueup.core.planning import Work
from trueup.models import LLM

llm = LLM.from_pretrained("glm-5-nano", progress=False)
nano, S = llm.model, 512
ids = llm.tokenizer.encode(inspect.getsource(base64))[:S]


def fresh():
    """Empty pools, and the four pages of a request."""
    page_ids = PagePool(5, 128)
    return Pools(nano.cache_spec, page_ids), page_ids.allocate(4)


# %%
@torch.inference_mode()
def run(pools, pages, start, end):
    """A chunk of the request: hidden rows [T, H], and by layer its attention's arguments."""
    work = Work(1, Mode.PREFILL, start, end - start, pages)
    view = materialise(plan([work], page_size=128), pools)
    given = {}

    def listen(attention, args, out):
        given[attention.layer] = args

    hooks = [layer.attention.register_forward_hook(listen) for layer in nano.layers]
    chunk = torch.tensor(ids[start:end], device=pools.spec.device)  # [T]
    hidden = nano.forward(chunk, view, pools)  # [T, H]
    for hook in hooks:
        hook.remove()
    return hidden, given


# %%
def seen(given, layer):
    """Which positions each row has chosen, bool [T, S]."""
    _, ctx = given[layer]
    places = ctx.choices.by_layer[layer].tensor[:, 0].long().cpu()  # [T, K]
    mask = torch.zeros(len(places), S + 1, dtype=torch.bool)  # its last column is for -1
    return mask.scatter(1, places.where(places >= 0, S), True)[:, :S]  # [T, S]


pools, pages = fresh()
hidden, given = run(pools, pages, 0, S)
maps = [seen(given, layer) for layer in range(3)]
assert all(mask.sum(1).tolist() == [min(t + 1, 64) for t in range(S)] for mask in maps)

# %% tags=["fold"]
from IPython.display import HTML


def figure(drawing, en, zh):
    caption = f'<span lang="en">{en}</span><span lang="zh">{zh}</span>'
    return HTML(f'<figure class="trueup-picture">{drawing}'
                f'<figcaption>{caption}</figcaption></figure>')


def svg(parts, box, style, name):
    return (f'<svg viewBox="{box}" style="{style}" role="img" aria-label="{name}" '
            f'fill="currentColor" font-size="12">{"".join(parts)}</svg>')


def label(x, y, words, anchor="middle", size=10):
    where = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}">{words}</text>'


def path(d, **style):
    style = {"stroke": "currentColor", "fill": "none", **style}
    style = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<path d="{d}"{style}/>'


# %% tags=["fold"]
from itertools import groupby


def triangle(mask, layer, n=S // 4):
    """A square is 4 rows by 4 positions; its shade: how many of the 16 pairs are chosen."""
    share = mask.float().view(n, 4, n, 4).mean((1, 3))  # [S/4, S/4]
    lines = ["", "", "", "", ""]  # by shade
    for y, row in enumerate((share * 4).ceil().int().tolist()):
        for shade, squares in groupby(range(n), key=row.__getitem__):
            places = list(squares)
            lines[shade] += f"M{places[0]} {y}h{len(places)}"
    parts = [path(lines[shade], stroke_opacity=shade / 4) for shade in (1, 2, 3, 4)]
    parts += [path(f"M0-.5V{n}H{n}", stroke_width=0.4)]
    parts += [label(n / 2, -3, f"layer {layer}", size=9)]
    style = "width:31%;min-width:200px;flex:1"
    return svg(parts, f"-1 -12 {n + 2} {n + 14}", style, f"layer {layer}")


figure('<div style="display:flex;flex-wrap:wrap;gap:8px">'
       f'{"".join(map(triangle, maps, range(3)))}</div>',
       "Rows from top to bottom, positions from left to right; the stronger, the more chosen. "
       "All keep the newest; beyond, layer 0 has columns, 1 lines of one distance, 2 patches.",
       "从上到下是各行，从左到右是各位置；颜色越重，选中的越多。"
       "各层都留着最近的词元；更远处，第 0 层是竖条，第 1 层是等距的斜线，第 2 层是斑块。")

# %% [markdown] tags=["en"]
# The first 64 rows choose all they see. After that, every layer keeps a solid band along the diagonal: the newest tokens.
# Beyond it the layers differ.
#
# - **Layer 0** has columns: some tokens are kept by one later row after the other.
# - **Layer 1** has lines along the diagonal: fixed *distances*, whatever stands there. That is rope at work.
# - **Layer 2** has patches: far places, chosen by content. Its left edge stands out: the first few tokens are chosen more
#   often than other far ones. Many models put attention there that has nowhere better to go (an *attention sink*).

# %% [markdown] tags=["zh"] pair="c30506-ef0538"
# 前 64 行把看得到的全部选中。此后每一层在对角线旁都有一条实心的带：最近的词元。带子以外，各层就不一样了。
#
# - **第 0 层**是竖条：有些词元，后面的行接二连三地选中它。
# - **第 1 层**是平行于对角线的线：固定的*距离*，不管那里是什么词元。这是 RoPE 的作用。
# - **第 2 层**是斑块：按内容选中的远处位置。左边缘也很显眼：最开头的几个词元比别的远处位置更常被选中；
#   不少模型都把没处可放的注意力放在那里（即 *attention sink*，注意力汇聚点）。

# %%
far_rows = slice(256, S)
distance = torch.arange(S)[far_rows, None] - torch.arange(S)  # [T, S]
local, far = (distance >= 0) & (distance < 16), distance >= 64  # [T, S] each
assert all(mask[far_rows][local].float().mean() > 0.8 for mask in maps)


def kept_by_next_row(mask, shift):
    """Share of far choices that the next row makes again, `shift` positions on."""
    own = (mask[far_rows] & far)[:-1, : S - 1]  # [T, S]
    following = mask[257:, shift : S - 1 + shift]  # [T, S]
    return (own & following).sum() / own.sum()


same_place = [kept_by_next_row(mask, 0) for mask in maps]
same_distance = [kept_by_next_row(mask, 1) for mask in maps]
assert same_place[0] > 1.5 * same_distance[0]
assert same_distance[1] > 1.5 * same_distance[0]
assert maps[2][far_rows, :4].float().mean() > 2 * maps[2][far_rows][far].float().mean()

# %% [markdown] tags=["en"]
# What is the content that layer 2 goes by? Here is one row: the last token shown is `b`, and the text before it has what
# the row has chosen underlined.

# %% [markdown] tags=["zh"] pair="d74cda-be28bb"
# 第 2 层按什么内容选？看其中一行：显示的最后一个词元是 `b`，前文里这一行选中的都加了下划线。

# %%
before = torch.tensor([-1, *ids[:-1]])  # [S]: the token before each position
apart = torch.arange(S)[:, None] - torch.arange(S)  # [T, S]
same_token = torch.tensor(ids)[:, None] == before  # [T, S]: it followed a copy of this token
match = same_token & (apart >= 64)  # [T, S]: far back, too

# %% tags=["fold"]
from html import escape

found = (match & maps[2]).sum(1).tolist()
[b] = llm.tokenizer.encode("b")
t = max((place for place, token in enumerate(ids) if token == b), key=found.__getitem__)
mark = ('<b style="font-weight:inherit;border-bottom:2px solid;margin-right:1px;'
        'background:color-mix(in srgb,currentColor 20%,transparent)">{}</b>')
text = ""
for place, token in enumerate(ids[: t + 1]):
    piece = escape(llm.tokenizer.decode([token])).replace("\n", "<br>")
    text += mark.format(piece) if maps[2][t, place] else piece
style = "white-space:pre-wrap;overflow-wrap:anywhere;font:12px/1.5 monospace"
figure(f'<div style="{style}">{text}</div>',
       "Chosen by the last row, layer 2: what followed an earlier b, and the newest tokens.",
       "最后一行在第 2 层选中的位置：前面各个 b 后面的词元，以及最近的词元。")

# %% [markdown] tags=["en"]
# It has chosen what *followed* the earlier `b`: `64`, `32`, `16`, `85`. That is the thing to know when the next token is
# to be guessed. A head that attends so is called an *induction head*. The dense layer had learned it; the indexer only
# had to find the same places. Over all rows:

# %% [markdown] tags=["zh"] pair="55d853-9bedf8"
# 它选中的是前面各个 `b` *后面*的词元：`64`、`32`、`16`、`85`。要猜下一个词元，最该知道的就是这些。
# 这样做注意力的头叫*归纳头*（induction head）。稠密的那一层早已学会了它，索引器只需找到同样的位置。对所有行统计：

# %%
hit = maps[2][far_rows][match[far_rows]].float().mean()
other = maps[2][far_rows][far & ~match[far_rows]].float().mean()
assert hit > 0.4 and hit > 3 * other

# %% [markdown] tags=["en"]
# ## How much attention do the best K hold?
#
# A choice is good if dense attention would have gone there. So we compute a layer's dense attention from its own inputs,
# averaged over heads, and ask the indexer for its best 256 positions. The *recall* at k is the share of that attention
# which the best k hold.

# %% [markdown] tags=["zh"] pair="31499d-3fa9e7"
# ## 最好的 K 个位置占了多少注意力？
#
# 稠密注意力本来会看的地方，选中了才算好。所以我们用一层自己的输入算出它的稠密注意力，对各头取平均，再让索引器给出最好的 256 个位置。
# 其中前 k 个所占的注意力份额，就是 k 处的*召回率*（recall）。

# %%
from dataclasses import replace


@torch.inference_mode()
def measured(layer):
    """Dense attention [T, S], mean over heads, and the indexer's best [T, 256]."""
    x, ctx = given[layer]  # [T, H], and what a forward shares
    attention, c = nano.layers[layer].attention, nano.config
    q_rank = attention.q_norm(x @ attention.q_a.T)  # [T, Rq]
    q = (q_rank @ attention.q_b.T).view(S, c.num_attention_heads, -1)  # [T, N, Dn+Dr]
    q_nope, q_rope = q[..., :-64], q[..., -64:]  # [T, N, Dn], [T, N, Dr]
    q_rope = torch.ops.npu.npu_interleave_rope(q_rope[:, :, None], ctx.cos, ctx.sin)[:, :, 0]
    latent, rope = pools.gather(layer, ctx.view.segments[0].slots)  # [S, R], [S, Dr]
    score = torch.einsum("tnd,ndr,sr->tns", q_nope, attention.w_uk, latent)  # [T, N, S]
    score += torch.einsum("tnd,sd->tns", q_rope, rope)  # [T, N, S]
    later = torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1)  # [T, S]
    score = (c.softmax_scale * score.float()).masked_fill(later[:, None], -torch.inf)
    dense = score.softmax(-1).mean(1)  # [T, S]
    indexer, usual = attention.indexer, attention.indexer.i
    indexer.i = replace(usual, topk=256)
    order = indexer.choose(x, q_rank, ctx.cos, ctx.sin, ctx.view, pools)  # Rows [T, 1, 256]
    indexer.i = usual
    return dense.cpu(), order.tensor[:, 0].long().cpu()  # [T, S], [T, 256]


# %%
def held(dense, order):
    """By k, the share of the first k positions: mean of rows 256 and on."""
    return dense[far_rows].gather(1, order[far_rows, :256]).cumsum(1).mean(0)  # [256]


newest = torch.arange(S)[:, None] - torch.arange(256)  # [T, 256]: a plain window
curves = []  # by layer: the indexer, the window, the best possible
for layer in range(3):
    dense, order = measured(layer)
    orders = (order, newest, dense.argsort(1, descending=True))
    curves.append([held(dense, places) for places in orders])

at_64 = [[curve[63].item() for curve in lines] for lines in curves]
for ours, _, possible in at_64:
    assert ours > 0.75 and possible - ours < 0.1
missed = [[1 - share for share in layer] for layer in at_64]
assert missed[2][1] > 1.5 * missed[2][0]  # the window misses far more in layer 2 ...
assert missed[1][1] < 0.1  # ... and is enough for layer 1

# %% tags=["fold"]
from math import log2, log10

DASHES = ("none", "6 3", "1 3")
parts = []
for layer, lines in enumerate(curves):
    x = 30 + layer * 150
    parts += [path(f"M{x} 24h120v120h-120zM{x + 72} 24v120", opacity=0.4)]
    parts += [label(x + 60, 16, f"layer {layer}", size=12)]
    parts += [label(x + 24 * log2(k / 8), 157, k) for k in (8, 64, 256)]
    parts += [label(x - 4, 177 - 150 * share, share, "end") for share in (0.2, 0.6, 1.0)]
    for line, dash in zip(lines, DASHES, strict=True):
        points = " ".join(f"{x + 24 * log2(k / 8):.0f},{174 - 150 * line[k - 1]:.1f}"
                          for k in (8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256))
        parts.append(path(f"M{points}", stroke_width=2, stroke_dasharray=dash))
figure(svg(parts, "0 0 460 162", "width:560px;max-width:100%", "recall by k"),
       "Share of dense attention held by k positions. Solid: the indexer; dashed: the newest "
       "k; dotted: the best possible; upright: K = 64. In layer 2 the window falls behind.",
       "k 个位置占稠密注意力的份额。实线：索引器；虚线：最近的 k 个；点线：最优的选择。"
       "竖线处 K = 64。第 2 层的虚线明显偏低。")

# %% [markdown] tags=["en"]
# In layer 1 nearly all attention is on the newest tokens, and any method finds those. Layer 2 is what an indexer is for:
# a window of the same size misses about twice as much of its attention, and the best possible choice would hold little
# more. What sparse attention does to the model's loss is measured in [chapter 15](ch15_train_indexer.md).
#
# ## Which numbers turn together (SB-28)
#
# Index queries and keys have rope, on their first `Dr` numbers. Rope turns pairs of numbers. *Half-split* pairs number
# $j$ with $j + D_r/2$; *interleaved* pairs $2j$ with $2j + 1$. DeepSeek-V3.2 has both: interleaved in MLA, half-split in
# the indexer. GLM-5 is interleaved in both.

# %% [markdown] tags=["zh"] pair="7286e6-8e97e8"
# 第 1 层的注意力几乎都在最近的词元上，什么方法都找得到。第 2 层才是索引器的用武之地：
# 同样大小的窗口漏掉的注意力大约是索引器的两倍；就算选得最优，占到的也只比索引器多一点。稀疏注意力对模型的损失有多大影响，[第 15 章](ch15_train_indexer.md)有实测。
#
# ## 哪两个数一起转（SB-28）
#
# 索引器的查询和键也带 RoPE，作用在前 `Dr` 个数上。RoPE 让数成对旋转：*前后对半*（half-split）把第 $j$ 个数和第 $j + D_r/2$ 个配成一对，
# *交错*（interleaved）把第 $2j$ 个和第 $2j + 1$ 个配成一对。DeepSeek-V3.2 两种都有：MLA 用交错，索引器用前后对半。GLM-5 两处都用交错。

# %%
def rotate(x, position, pairs):
    turn = position * torch.tensor([1.0, 0.01])  # [Dr/2]
    first, second = (x[0::2], x[1::2]) if pairs == "interleaved" else x.chunk(2)
    cos, sin = turn.cos(), turn.sin()  # [Dr/2] each
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin])
    return (turned.T if pairs == "interleaved" else turned).flatten()  # [Dr]


x, y = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 0, 2, -1])  # [Dr]
half, inter = (rotate(x, 1, pairs) for pairs in ("half", "interleaved"))
assert_close(half, torch.tensor([-1.9841, 1.9599, 2.4624, 4.0198]), atol=1e-4, rtol=0)
assert_close(inter, torch.tensor([-1.1426, 1.9221, 2.9599, 4.0298]), atol=1e-4, rtol=0)


def dot(q_at, k_at, pairs):
    return rotate(x, q_at, pairs) @ rotate(y, k_at, pairs)


for pairs in ("half", "interleaved"):
    assert_close(dot(9, 7, pairs), dot(5, 3, pairs))  # only the distance counts
assert abs(dot(9, 7, "half") - dot(9, 7, "interleaved")) > 1  # but the scores differ

# %% [markdown] tags=["en"]
# So with the wrong pairs everything still runs, and scores still depend on distance. In this project the pairing is a
# config value of the indexer, `rope_interleave`. We turn it over in the nano model:

# %% [markdown] tags=["zh"] pair="952e85-1d86df"
# 所以配对弄错了，一切照样能跑，得分也照样只取决于距离。在本项目里，配对方式是索引器的一个配置值 `rope_interleave`。
# 我们把 nano 模型的这个值反过来：

# %%
def with_other_pairs(call):
    indexers = [layer.attention.indexer for layer in nano.layers]
    usual = indexers[0].i
    for indexer_ in indexers:
        indexer_.i = replace(usual, rope_interleave=not usual.rope_interleave)
    try:
        return call()
    finally:
        for indexer_ in indexers:
            indexer_.i = usual


wrong, given_wrong = with_other_pairs(lambda: run(*fresh(), 0, S))
assert_close(wrong[:64], hidden[:64], rtol=1e-3, atol=1e-3)  # nothing to see

# %% tags=["raises-exception"] raises="AssertionError" says="wrong from row"
same_rows = torch.isclose(wrong, hidden, rtol=1e-3, atol=1e-3).all(1)  # [T]
assert same_rows.all(), f"wrong from row {same_rows.int().argmin()} on"

# %%
for layer in range(3):
    other_choice = seen(given_wrong, layer)  # [T, S]
    assert torch.equal(other_choice[:64], maps[layer][:64])  # all of them
    agree = (other_choice & maps[layer])[far_rows].sum() / maps[layer][far_rows].sum()
    assert agree < 0.75

# %% [markdown] tags=["en"]
# Up to K tokens there is no choice to get wrong. In the published models K is 2,048, longer than most test prompts. So
# [SB-28](../bugs.md#sb-28) shows as a few lost points on long-context benchmarks. vllm-ascend mended it (PR #4641), lost
# it in a refactoring, and mended it again (PR #7341); sglang PR #13495 is the same. DeepSeek's own inference code had it
# until November 2025. Test with a small K, or with a long text.
#
# ## Short prompts: dense, but the keys are written
#
# If a prompt has no more than K tokens, each row would choose all it sees. An engine may then skip the indexer and run
# dense attention, in the expanded form, which is cheaper for prompts. trueup does (`sees_all` in
# `trueup/core/attention/sparse.py`). One thing must not be skipped: the index keys go into the cache all the same, for
# token K + 1 is going to read them. Here is a short cut that forgot them:

# %% [markdown] tags=["zh"] pair="440407-9575aa"
# 不超过 K 个词元时，没有什么可选错的。公开模型的 K 是 2,048，比多数测试用的提示词都长，
# 所以 [SB-28](../bugs.md#sb-28) 表现为长上下文评测掉几分。vllm-ascend 修过一次（PR #4641），一次重构又把它弄丢，于是再修一次（PR #7341）；
# sglang PR #13495 修的是同一件事。DeepSeek 自己的推理代码到 2025 年 11 月才改对。测试时，要么用小的 K，要么用长文本。
#
# ## 短提示词：走稠密，但索引键照写
#
# 提示词不超过 K 个词元时，每一行反正都是全选。于是引擎可以跳过索引器，用展开式做稠密注意力，对提示词来说这更省。
# trueup 就这样做（`trueup/core/attention/sparse.py` 里的 `sees_all`）。但有一件事不能跳过：索引键照样要写进缓存，
# 因为第 K + 1 个词元就要读它们了。下面这条捷径忘了写：

# %%
def second_chunk(keys_written):
    pools, pages = fresh()
    run(pools, pages, 0, 48)  # no more than 64 tokens: dense
    if not keys_written:
        for keys in pools.index.values():  # [pages, P, 1, Di]
            keys.zero_()
    return run(pools, pages, 48, 128)


right, given_right = second_chunk(keys_written=True)
assert_close(right, hidden[48:128], rtol=1e-3, atol=1e-3)  # as in one piece

# %% tags=["raises-exception"] raises="AssertionError" says="wrong from position"
wrong, given_wrong = second_chunk(keys_written=False)
same_rows = torch.isclose(wrong, right, rtol=1e-3, atol=1e-3).all(1)  # [T]
assert same_rows.all(), f"wrong from position {48 + same_rows.int().argmin()} on"

# %%
assert_close(wrong[:16], right[:16], rtol=1e-3, atol=1e-3)  # positions 48 to 63
for layer in range(3):
    usual = seen(given_right, layer)[64:, :48].sum()  # of the first 48 tokens
    left = seen(given_wrong, layer)[64:, :48].sum()
    assert left < 0.5 * usual

# %% [markdown] tags=["en"]
# Again nothing shows before token K + 1. After it, the prompt fades from view while the answer stays fluent.
#
# ## Cost against context
#
# What one decoded token costs in one layer of GLM-5: R = 512, Dr = 64, N = 64 heads; the indexer has `Ni` = 32, `Di` =
# 128. We count multiplications of scores and weighted sums, and bytes read from the cache in bf16. The same on a clock,
# with this project's kernels on a CPU, is in [Numbers](../numbers.md#sparse-decode).

# %% [markdown] tags=["zh"] pair="7d4fcc-2b52ca"
# 和前面一样，第 K + 1 个词元之前什么也看不出来。此后提示词渐渐从视野里消失，回答却依然通顺。
#
# ## 开销与上下文长度
#
# 在 GLM-5 的一层里，解码一个词元要花多少：R = 512，Dr = 64，N = 64 个头；索引器 `Ni` = 32，`Di` = 128。
# 我们数打分和加权求和的乘法次数，以及从缓存读的字节数（bf16）。用本项目的内核在 CPU 上实测的耗时，见[数据](../numbers.md#sparse-decode)。

# %%
N, R, Dr, Ni, Di, K = 64, 512, 64, 32, 128, 2048


def dense_cost(S):
    return S * N * (R + Dr + R), S * (R + Dr) * 2  # multiplications, bytes


def index_cost(S):
    return S * Ni * Di, S * Di * 2


def sparse_cost(S):
    indexing, attending = index_cost(S), dense_cost(min(S, K))
    return indexing[0] + attending[0], indexing[1] + attending[1]


long = 131_072
assert sparse_cost(1024)[0] > dense_cost(1024)[0]  # below K the indexer comes on top
assert dense_cost(long)[0] / sparse_cost(long)[0] > 13
assert dense_cost(long)[1] / sparse_cost(long)[1] > 4
assert index_cost(long)[0] / sparse_cost(long)[0] > 0.75

# %% tags=["fold"]
contexts = [2**i for i in range(9, 18)]
parts = []
for panel, (title, low) in enumerate((("multiplications", 6), ("bytes read", 5))):
    x = 40 + panel * 190
    parts += [path(f"M{x} 24h144v120h-144z", opacity=0.4), label(x + 72, 16, title, size=12)]
    parts += [label(x + 18 * log2(context / 512), 158, name)
              for context, name in ((512, "512"), (8192, "8k"), (131_072, "128k"))]
    parts += [label(x - 4, 147 - 30 * power, f"1e{low + power}", "end") for power in (0, 2, 4)]
    for cost, dash in zip((sparse_cost, dense_cost, index_cost), DASHES, strict=True):
        points = " ".join(f"{x + 18 * log2(context / 512):.0f},"
                          f"{144 - 30 * (log10(cost(context)[panel]) - low):.1f}"
                          for context in contexts)
        parts.append(path(f"M{points}", stroke_width=2, stroke_dasharray=dash))
figure(svg(parts, "0 0 400 164", "width:480px;max-width:100%", "cost by context"),
       "A decoded token of GLM-5 in a layer, log scales. Dashed: dense; dotted: the indexer; "
       "solid: indexer and sparse attention together, cheaper than dense only beyond K.",
       "GLM-5 的一层解码一个词元，对数坐标。虚线：稠密；点线：索引器；"
       "实线：索引器加稀疏注意力，过了 K 才比稠密便宜。")

# %% [markdown] tags=["en"]
# At 131,072 tokens a thirteenth of the multiplications are left, and a quarter of the bytes. The cost still grows with the
# context, because the indexer reads every key. But its slope is low: a 128-wide key against a 576-wide latent, and 32
# small heads against 64 large ones. Attention itself stops growing at K. Below K, sparse costs more than dense.
#
# Memory is not saved. Any later row may choose any position, so all latents stay, and index keys come on top.
#
# ## Layers without an indexer: GLM-5.2
#
# At long contexts the indexer is most of the cost. So GLM-5.2 shares choices: only 21 of its 78 layers have an indexer.
# The others attend to what the nearest such layer before them chose; they have no indexer weights and no index keys. The
# published list (`full` below: has an indexer of its own) follows a rule:

# %% [markdown] tags=["zh"] pair="c7c315-cec0a4"
# 到 131,072 个词元时，乘法只剩十三分之一，读的字节只剩四分之一。开销仍随上下文增长，因为索引器要读每一个键。但斜率很小：
# 128 宽的键对 576 宽的潜变量，32 个小头对 64 个大头。注意力本身到了 K 就不再增长。上下文不足 K 时，稀疏反而比稠密贵。
#
# 内存并没有省。后面的任何一行都可能选中任何位置，所以潜变量一个也不能丢，还要加上索引键。
#
# ## 没有索引器的层：GLM-5.2
#
# 上下文一长，大部分开销都在索引器上。所以 GLM-5.2 让各层共用选择：78 层里只有 21 层有索引器；
# 其余各层直接用前面最近的那一层的选择，既没有索引器的权重，也没有索引键。公布的层列表
# （即下面的 `full`，标出哪些层自带索引器）符合一条规则：

# %%
from trueup.core.cache import CacheSpec
from trueup.models.config import IndexerConfig

every, offset = 4, 3  # index_topk_freq, index_skip_topk_offset
full = [max(layer - offset + 1, 0) % every == 0 for layer in range(78)]
owners = [layer for layer in range(78) if full[layer]]
assert [layer % every == 0 for layer in range(78)] != full  # without the offset
assert len(owners) == 21 and owners[:6] == [0, 1, 2, 6, 10, 14] and owners[-1] == 74

config = IndexerConfig(heads=Ni, head_dim=Di, topk=K, rope_interleave=True,
                       full=tuple(full), share_between_drafts=True)
assert config.reuse.source[:8] == (0, 1, 2, 2, 2, 2, 6, 6)  # whose choice each layer takes


def bytes_per_token(index_layers):
    where = torch.device("cpu")
    return CacheSpec(78, R, Dr, torch.bfloat16, where, Di, tuple(index_layers)).bytes_per_token


assert bytes_per_token([]) == 89_856  # dense
assert bytes_per_token(owners) == 95_232  # GLM-5.2
assert bytes_per_token(range(78)) == 109_824  # an indexer in every layer: GLM-5

# %% [markdown] tags=["en"]
# 95,232 bytes a token are 6 % more than without an indexer. Do not derive the list from the frequency alone: without
# the offset it is another one.
#
# ## What real engines do
#
# - vllm-ascend and the CANN recipes: these two operators, in every mode, with the lengths of one batch for both
#   (`vllm_ascend/attention/sfa_v1.py`).
# - sglang on NPUs: the same. On GPUs it has the dense short cut for prompts up to 2,048, never for verify or decode;
#   keys are written in any case (`python/sglang/srt/layers/attention/nsa_backend.py`).
# - DeepSeek's reference multiplies queries and keys by a Hadamard matrix, which changes no dot product, and stores keys
#   in fp8 with a scale: 132 bytes instead of 256. trueup keeps bf16.
# - transformers turns the choice into a mask for prompts. It has the pairing written into each class.
#
# ## Exercises
#
# **1.** From which context on does GLM-5 decode with fewer multiplications sparse than dense? And with fewer bytes read?

# %% [markdown] tags=["zh"] pair="c7cbf3-b53faf"
# 每词元 95,232 字节，比没有索引器时多 6 %。只凭 `index_topk_freq` 推不出这个列表：漏掉偏移，得到的是另一个。
#
# ## 真实引擎怎么做
#
# - vllm-ascend 和 CANN recipes：每种模式都用这两个算子，两者用同一个 batch 的长度（`vllm_ascend/attention/sfa_v1.py`）。
# - sglang：NPU 上同样如此；GPU 上，不超过 2,048 的提示词走稠密捷径，验证和解码从不走；索引键无论如何都写
#   （`python/sglang/srt/layers/attention/nsa_backend.py`）。
# - DeepSeek 的参考实现给查询和键都乘一个 Hadamard 矩阵，点积不变；键以 fp8 加缩放系数存放，132 字节，而不是 256。trueup 用 bf16。
# - transformers 处理提示词时把选择变成掩码；配对方式写死在每个类里。
#
# ## 练习
#
# **1.** 上下文从多长起，GLM-5 解码时稀疏的乘法次数少于稠密？读的字节数呢？

# %% tags=["solution"]
first = [next(S for S in range(1, 10_000) if sparse_cost(S)[what] < dense_cost(S)[what])
         for what in (0, 1)]
assert first == [2177, 2634]

# %% [markdown] tags=["en"]
# **2.** An fp8 cache stores each index key with a positive scale of its own. May the scale be multiplied in after the
# sum over heads? What if scales could be negative?

# %% [markdown] tags=["zh"] pair="cf57de-74d192"
# **2.** fp8 缓存里，每个索引键各带一个正的缩放系数。这个系数可以等到对各头求和之后再乘吗？假如系数可以是负数呢？

# %% tags=["solution"]
def scores_of(key):
    dots = torch.einsum("thd,sd->ths", query, key)  # [T, Ni, S]
    return torch.einsum("th,ths->ts", weights, dots.relu())  # [T, S]


scales = torch.tensor([0.5, 2, 1, 4, 0.25, 1, 2, 0.5])  # [S]
assert torch.equal(scores_of(key * scales[:, None]), scores_of(key) * scales)
# A positive factor passes through ReLU; a negative one does not.
assert not torch.equal(scores_of(key * -scales[:, None]), scores_of(key) * -scales)

# %% [markdown] tags=["en"]
# **3.** Turn round the positions in each row, with -1 left at the end. What changes?

# %% [markdown] tags=["zh"] pair="53ba8b-6dca25"
# **3.** 把每一行的位置倒过来排，-1 仍留在末尾。有什么变化？

# %% tags=["solution"]
turned = [[place for place in reversed(row) if place >= 0] + [-1] * row.count(-1)
          for row in chosen]
same(attend(turned), masked_dense(chosen))  # nothing, but for rounding

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Run all cells. The eight tokens are bf16 and 128 wide, the calls have passed `audit`, and the nano model runs in
# bfloat16. There, comparisons of whole forwards may need wider tolerances. No device has run this chapter. Three
# [open points](../operators/index.md#open-points) touch it: the order of equal scores (`li-tie-order`), what a row of
# only -1 yields (`sfa-empty-row`), and what is left in rows behind the last length (`rows-past-the-end`). See
# [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="424667-f96864"
# ## 在 NPU 机器上
#
# 运行全部单元格即可。八个词元用的是 bf16、128 宽，调用都通过了 `audit`；nano 模型以 bfloat16 运行，
# 在那里比较整次前向的结果，容差可能要放宽。本章还没有在任何设备上运行过。与它有关的[未决点](../operators/index.md#open-points)有三个：
# 得分相同时的先后（`li-tie-order`）、全是 -1 的行得到什么（`sfa-empty-row`）、最后一个长度之后的行里留着什么（`rows-past-the-end`）。
# 参见[哪些在哪里跑过](../what-ran-where.md)。
