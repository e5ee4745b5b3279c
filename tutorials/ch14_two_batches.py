# ---
# title:
#   en: "14. One index tensor, two batches"
#   zh: "14. 一个索引张量，两个 batch"
# outcome:
#   en: you can say which batch each tensor of a sparse-attention call counts, and find in an engine where two of them part
#   zh: 能说清稀疏注意力调用里每个张量数的是哪个 batch，并在引擎里找出它们从哪里开始不一致
# minutes: 20
# prerequisites:
#   en: "[chapter 2](ch02_shapes.md) (real and padded), [chapter 10](ch10_eagle.md) (a speculative round), [chapter 13](ch13_sparse.md) (choosing and attending)"
#   zh: "[第 2 章](ch02_shapes.md)（真实与填充）、[第 10 章](ch10_eagle.md)（投机的一轮）、[第 13 章](ch13_sparse.md)（先选位置，再算注意力）"
# bugs: [SB-01, SB-02, SB-19]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** Sparse attention is two operator calls. The first chooses positions, the second attends to them, and
# between them goes an *index tensor*: one row of positions for each query row. With speculation the rows may even be
# chosen in one forward and used in the next. Two forwards, two paddings: so the index tensor may count one batch while
# the queries count another. This happened in sglang, on NPUs ([SB-01](../bugs.md#sb-01) and
# [SB-02](../bugs.md#sb-02)), and pull request 32791 repaired it. trueup was begun because of that bug. This chapter takes
# it apart, repairs it as upstream did, and then shows why it cannot be written here.
#
# ## The batch
#
# Three requests, A, B and C, verify two drafts each. With the pending token that is W = 3 query rows a request, 9 in
# all. Their key lengths, the new rows included, are 9, 5 and 12. Five tensors go into the two calls:
#
# | tensor | shape | counts |
# |---|---|---|
# | queries, of the indexer and of attention | [T, N, ...] | token rows |
# | index rows | [T, 1, K] | token rows |
# | query lengths, cumulative | [B] | requests |
# | key lengths | [B] | requests |
# | block table | [B, columns] | requests |
#
# K is how many positions a row chooses; here it is 4. In the engine of the bug, *data-parallel ranks* share a model's
# experts and therefore agree on one number of rows. Another rank has four requests, so this one must bring 12 rows. The
# plan has been made by then:

# %% [markdown] tags=["zh"] pair="775899-6c19d6"
# **要点。** 稀疏注意力是两次算子调用：第一次选位置，第二次只对选中的位置算注意力。中间传递的是*索引张量*：每个查询行对应一行位置。
# 有了投机解码，这些行甚至会在一次前向里选出，到下一次前向才用。两次前向，两次填充，于是可能出现这样的情形：索引张量数的是一个 batch，
# 查询数的是另一个。这件事真的在 NPU 上的 sglang 里发生过（[SB-01](../bugs.md#sb-01) 和 [SB-02](../bugs.md#sb-02)），
# 由 PR #32791 修好；trueup 这个项目正是因它而起。
# 本章把这个缺陷拆开来看，先照上游的办法修一遍，再说明为什么在 trueup 里根本写不出它。
#
# ## 这个 batch
#
# 三个请求 A、B、C，各验证两个草稿。加上待定词元，每个请求 W = 3 个查询行，一共 9 行。键长度（含新行）是 9、5、12。
# 两次调用用到五个张量：
#
# | 张量 | 形状 | 数的是什么 |
# |---|---|---|
# | 查询（索引器的和注意力的） | [T, N, ...] | 词元行 |
# | 索引行 | [T, 1, K] | 词元行 |
# | 查询长度（累计值） | [B] | 请求 |
# | 键长度 | [B] | 请求 |
# | 块表 | [B, 列数] | 请求 |
#
# K 是一行选多少个位置，这里取 4。在出错的那个引擎里，几个*数据并行的 rank* 共用模型的专家，因此要约定同一个行数。
# 另一个 rank 有四个请求，所以这个 rank 也得凑够 12 行。可是规划在这之前就做完了：

# %% tags=["fold"]
from trueup.core.picture import boxes

rows = [*"AAABBBCCC"]
boxes([("1 real batch: query rows", rows),
       ("2 plan: key lengths", ["9", "5", "12"]),
       ("2 plan: block table", ["p1", "p2", "p3"]),
       ("3 padding: query rows", [*rows, *[("?", "bad")] * 3]),
       ("4 indexer: query lengths", ["3", "6", "9", ("12", "bad")])],
      ("Step by step. The plan counts three requests. "
       "The indexer reads its lengths off the padded rows: four.",
       "逐步来看。规划数的是三个请求；索引器从填充后的行推出查询长度，数成了四个。"))

# %% [markdown] tags=["en"]
# ## Set-up
#
# As in [chapter 2](ch02_shapes.md): tiny widths under `profile("paper")`, real ones on an NPU machine. A page holds
# P = 16 tokens, and request A, B, C has page 1, 2, 3. The cache has three pools: latents (R), rope parts (Dr), and the
# indexer's keys (Di). `select` and `attend` are the two calls. Both take the first `rows` rows of the padded tensors
# below.

# %% [markdown] tags=["zh"] pair="792cca-6738f6"
# ## 准备
#
# 与[第 2 章](ch02_shapes.md)一样：在 `profile("paper")` 之下用很小的宽度，在 NPU 机器上用真实宽度。一页 P = 16 个词元，
# 请求 A、B、C 分别用第 1、2、3 页。缓存有三个池子：潜变量（R）、rope 部分（Dr）、索引器的键（Di）。
# `select` 和 `attend` 就是那两次调用，各取下面填充好的张量的前 `rows` 行。

# %%
import torch

from trueup.core import audit, load, materialise, pad_topk, plan
from trueup.core.attention.choices import grown, padding_choice
from trueup.core.attention.sparse import choose, sparse
from trueup.core.cache import CacheSpec, Pools
from trueup.core.carry import for_layout
from trueup.core.device import pick_device
from trueup.core.layout import Mode
from trueup.core.ops.contract import OPEN_POINTS, profile
from trueup.core.pages import PagePool
from trueup.core.planning import Work

load()
device = pick_device()
N, P, K, W = 2, 16, 4, 3  # heads; tokens a page; positions a row; rows a request
R, Dr, Di, dtype, tolerance = 8, 4, 8, torch.float64, 1e-9
if device.type == "npu":
    R, Dr, Di, dtype, tolerance = 512, 64, 128, torch.bfloat16, 2e-2


def rules():
    return audit() if device.type == "npu" else profile("paper")

# %%
torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape).to(device, dtype)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def equal(a, b):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


pools = Pools(CacheSpec(1, R, Dr, dtype, device, Di, (0,)), PagePool(6, P))
latent, rope, index = pools.latent[0], pools.rope[0], pools.index[0]
for pool in (latent, rope, index):  # [pages, P, 1, R], [.., Dr], [.., Di]
    pool[1:] = random(5, *pool.shape[1:])
q, q_rope = random(12, N, R), random(12, N, Dr)  # [Tp, N, R], [Tp, N, Dr]
iq, iw = random(12, N, Di), random(12, N).abs()  # [Tp, N, Di], [Tp, N]: of the indexer

# %%
def select(rows, q_cum, kv_lens, table):
    """The indexer: the positions that each query row will attend to, [T, 1, K]."""
    with rules():
        return torch.ops.npu.npu_lightning_indexer(
            iq[:rows], index, iw[:rows], actual_seq_lengths_query=int32(q_cum),
            actual_seq_lengths_key=int32(kv_lens), block_table=int32(table),
            layout_query="TND", layout_key="PA_BSND", sparse_count=K, sparse_mode=3)[0]


def attend(rows, chosen, q_cum, kv_lens, table):
    """Attention of each query row to the positions in its index row, [T, N, R]."""
    with rules():
        return torch.ops.npu.npu_sparse_flash_attention(
            q[:rows], latent, latent, chosen, 0.3,
            query_rope=q_rope[:rows], key_rope=rope,
            actual_seq_lengths_query=int32(q_cum), actual_seq_lengths_kv=int32(kv_lens),
            block_table=int32(table), layout_query="TND", layout_kv="PA_BSND",
            sparse_block_size=1, sparse_mode=3, attention_mode=2)[0]

# %% [markdown] tags=["en"]
# Without padding all is well. An index row holds positions *inside its request*, best first, and -1 behind them. B's
# first row sees 3 keys only, so it has one -1.

# %% [markdown] tags=["zh"] pair="710c77-19c90f"
# 没有填充时一切正常。索引行里存的是*请求内部的*位置，最好的在前，后面是 -1。B 的第一行只看得到 3 个键，所以有一个 -1。

# %%
table = [[1], [2], [3]]
alone = select(9, [3, 6, 9], [9, 5, 12], table)  # [T, 1, K]
assert alone.shape == (9, 1, K)
assert (alone[3] == -1).sum() == 1 and (alone[4:] >= 0).all()

# %% [markdown] tags=["en"]
# ## The first wrong call (SB-01)
#
# Now the queries have 12 rows. The indexer of the engine made its query lengths from them: one every W rows.

# %% [markdown] tags=["zh"] pair="92aefc-7f76ca"
# ## 第一次错误的调用（SB-01）
#
# 现在查询有 12 行。那个引擎的索引器从行数推出查询长度：每 W 行一个。

# %% tags=["raises-exception"] raises="ContractError" says="3 lengths, [3] int32"
select(12, [3, 6, 9, 12], [9, 5, 12], table)

# %% [markdown] tags=["en"]
# Read it. The operator counts requests by the query lengths: four. There are three key lengths. Neither list is wrong
# by itself: `[3, 6, 9, 12]` fits the padded batch, `[9, 5, 12]` fits the real one. So the advice is to take all from
# one plan.
#
# On a device some of this is checked by the *tiling*, the host part of an operator that divides a call among the
# cores. A report of this very bug, sglang PR #32762, quotes it: `actual_seq_lengths_query/key/block_table dim 0: 3/2/2`.
# The server stops, in the middle of an operator, with three numbers and not a word about padding. Were there no check,
# the kernel would take a fourth key length from the memory behind the list, and a fourth line of pages from behind the
# table. Whose are they? Nobody's, or another batch's.
#
# ## The second wrong call (SB-02)
#
# The draft layer has an indexer, too. Some models skip it in the draft steps. These attend to what was chosen when the
# draft layer ran over the verified rows (the *extend* forward of [chapter 10](ch10_eagle.md)). Say that A keeps 3 of
# these rows, B 1 and C 2. Then the last kept rows are 2, 3 and 7; their index rows are carried into the next round.
# There each request has one query row. A has 10 keys: the 6 from before the round, 3 kept, and the new one; B has 4,
# C 12. Again the rows are padded for the other rank:

# %% [markdown] tags=["zh"] pair="2758a3-5360ce"
# 读一读这条消息。算子按查询长度数请求：四个；键长度却只有三个。两个列表单看都没有错：`[3, 6, 9, 12]` 符合填充后的 batch，
# `[9, 5, 12]` 符合真实的 batch。所以它的建议是：全部取自同一份规划。
#
# 在设备上，其中一部分由 *tiling* 检查；tiling 是算子在主机侧的部分，负责把一次调用切分给各个核。
# 报告同一个缺陷的 sglang PR #32762 引用了它的报错：`actual_seq_lengths_query/key/block_table dim 0: 3/2/2`。
# 服务停在一个算子中间，只给出三个数字，一个字也没提填充。假如没有这项检查，内核就会到列表后面的内存里去取第四个键长度，
# 到块表后面去取第四行页号。那是谁的？不属于任何人，或者属于别的 batch。
#
# ## 第二次错误的调用（SB-02）
#
# 草稿层也有索引器。有些模型在草稿步里省掉它，直接沿用先前选好的位置，也就是草稿层在验证过的行上跑一遍时选出的
# （[第 10 章](ch10_eagle.md)的*扩展*前向）。假设这些行里，A 留下 3 行，B 留下 1 行，C 留下 2 行，
# 那么最后保留的行是第 2、3、7 行，它们的索引行被带进下一轮。下一轮里每个请求只有一个查询行。
# A 有 10 个键：这一轮之前的 6 个、留下的 3 个、新的 1 个；B 有 4 个，C 有 12 个。这时查询行又为了另一个 rank 而填充：

# %% tags=["fold"]
kept = {2, 3, 7}
names = [f"{r}{i}" for r in "ABC" for i in range(W)]
boxes([("extend: index rows",
        [name if row in kept else (name, "pad") for row, name in enumerate(names)]),
       ("carried: index rows", ["A2", "B0", "C1"]),
       ("plan: key lengths", ["10", "4", "12"]),
       ("padding: query rows", [*"ABC", ("?", "bad")])],
      ("The index rows were carried from one forward, "
       "the queries were padded in another: 3 against 4.",
       "索引行从一次前向带来，查询行在另一次前向里填充：3 行对 4 行。"))

# %%
carried = alone[[2, 3, 7]]  # [B, 1, K]; alone stands in for what the extend forward chose
lists = ([1, 2, 3], [10, 4, 12], table)
right = attend(3, carried, *lists)  # [B, N, R], what these three rows must give
assert right.isfinite().all()

# %% tags=["raises-exception"] raises="ContractError" says="3 rows, [3, 1, 4] int32"
attend(4, carried, *lists)

# %% [markdown] tags=["en"]
# Here the lengths agree among themselves, and with the index rows. Only the queries have been padded. Without a check
# the kernel would read a fourth row behind the end of the index tensor, and take for positions what it finds there.
# Shape inference lets both calls pass ([chapter 8](ch08_reading_an_operator.md) shows it), so a graph that traces
# without error proves nothing.
#
# ## Counts that agree by luck
#
# The worst variant is the one that no check can see. In this batch the right index rows are 2, 3 and 7 of nine. An
# engine that keeps the nine in one buffer, and takes as many as it has requests, takes rows 0, 1 and 2. Three rows for
# three queries:

# %% [markdown] tags=["zh"] pair="7be3e7-2bcb15"
# 这里各个长度彼此一致，与索引行也一致，只有查询被填充过。要是没有检查，内核会越过索引张量的末尾再读一行，
# 把那里的内容当成位置。两次错误的调用都能通过形状推导（见[第 8 章](ch08_reading_an_operator.md)），
# 所以追踪（trace）成功什么也证明不了。
#
# ## 个数碰巧相等
#
# 最糟的是任何检查都看不出来的那种。这个 batch 里，该用的是九行索引中的第 2、3、7 行。
# 如果引擎把九行放在一个缓冲区里，有几个请求就从头取几行，取到的就是第 0、1、2 行。
# 三个查询，三行索引，个数正好：

# %%
foreign = alone[:3]  # [B, 1, K]: three rows, all of request A
wrong = attend(3, foreign, *lists)  # [B, N, R], and no error
off = (wrong - right).abs().amax((1, 2)).tolist()
pairs = zip("ABC", carried.tolist(), foreign.tolist(), off, strict=True)
for name, [good], [bad], distance in pairs:
    print(f"{name}: must see {good!s:<15} sees {bad!s:<15} off by {distance:.2f}")
assert wrong.isfinite().all() and min(off) > 0.05

# %% [markdown] tags=["en"]
# All three outputs are wrong, and nothing has failed. Each query still reads its own request's cache, for an index row
# holds positions, not slots. But it looks where A had looked. In a layer of the target the text would be wrong. In a
# draft step verification corrects it, and what remains is a lower acceptance. Nobody searches for a shape bug because
# of that.
#
# ## The repair upstream
#
# Pull request 32791 has two halves. **First half**: the query lengths are made with the plan, from the real batch, and
# kept there. The indexer takes them instead of counting its own rows. In verification that is `[3, 6, 9]`, in a step
# of one row a request `[1, 2, 3]`.

# %% [markdown] tags=["zh"] pair="f69801-48afb1"
# 三个输出全错了，却没有任何报错。每个查询读的仍是自己请求的缓存，因为索引行里是位置，不是槽位；
# 只是它看的是 A 当时看过的地方。
# 如果发生在目标模型的层里，文本就错了；发生在草稿步里，验证会把文本纠正过来，剩下的只是接受率偏低。
# 没有人会因为接受率低去查形状的问题。
#
# ## 上游的修法
#
# PR #32791 分两半。**前一半**：查询长度在做规划时按真实的 batch 生成，存进规划；索引器直接取用，不再数自己的行。
# 验证时是 `[3, 6, 9]`，每个请求一行的步骤里是 `[1, 2, 3]`。

# %%
padded = select(12, [3, 6, 9], [9, 5, 12], table)  # [Tp, 1, K]
assert torch.equal(padded[:9], alone)
if device.type == "cpu":  # our kernel marks what a device leaves unwritten
    assert (padded[9:] == torch.iinfo(torch.int32).max).all()

# %% [markdown] tags=["en"]
# The call passes: there may be rows behind the last length. They belong to nobody, so their results are undefined, and
# the engine has to cut them off. Whether a device leaves or clears them is the
# [open point](../operators/index.md#open-points) `rows-past-the-end`.
#
# **Second half**: before sparse attention the index tensor gets as many rows as the queries. The new ones are -1
# throughout. As a function of its own it is [`pad_topk`][trueup.core.pad_topk]:

# %% [markdown] tags=["zh"] pair="ae0af8-9ad310"
# 调用通过了：最后一个长度之后允许还有行。它们不归任何请求，结果没有定义，引擎必须自己切掉。
# 设备会让它们保持原样还是清零，是[未决点](../operators/index.md#open-points) `rows-past-the-end`。
#
# **后一半**：进入稀疏注意力之前，把索引张量补到与查询同样多的行，补上的行全是 -1。写成单独的函数，就是
# [`pad_topk`][trueup.core.pad_topk]：

# %%
four = pad_topk(carried, 4)  # [Tp, 1, K]
assert torch.equal(four[:3], carried) and (four[3] == -1).all()
assert four.dtype == carried.dtype == torch.int32
assert equal(attend(4, four, *lists)[:3], right)

# %% [markdown] tags=["en"]
# ## Why -1, and what must come of it
#
# Here row 3 has no owner, so its content does not matter. It begins to matter when a request owns the row. Give it
# one, with four keys on page 0, the dummy page, and try three fillings. Zeros say: position 0, four times. A key that is
# chosen four times has four times the weight, so the contract refuses:

# %% [markdown] tags=["zh"] pair="4342fe-de77ec"
# ## 为什么是 -1，结果又该是什么
#
# 这里第 3 行没有主人，填什么都无所谓。等到有请求拥有这一行，填什么就要紧了。给它一个请求，在第 0 页（哑页）上有四个键，
# 试三种填法。填零的意思是：位置 0，选四次。选了四次的键，权重就是四倍，所以契约拒绝：

# %% tags=["raises-exception"] raises="ContractError" says="0 more than once"
covered = ([1, 2, 3, 4], [10, 4, 12, K], [*table, [0]])
zeros = torch.cat([carried, torch.zeros_like(carried[:1])])  # [Tp, 1, K]
attend(4, zeros, *covered)

# %% [markdown] tags=["en"]
# -1 says: nothing. What is attention to nothing? By the formula, 0 divided by 0. As an index in Python, -1 is the last
# key. Neither will do, since the row goes on through the layer with the others. The right answer is zeros. The
# third filling, one valid position and then -1, avoids the question.

# %% [markdown] tags=["zh"] pair="dc8839-0a8912"
# -1 的意思是：什么也不选。对“什么也没有”做注意力，结果是什么？按公式是 0 除以 0；当作 Python 的下标，-1 是最后一个键。
# 两样都不行，因为这一行还要和别的行一起走完这一层。正确答案是零。第三种填法是一个有效位置加若干 -1，它绕开了这个问题。

# %%
assert torch.full((K,), float("-inf")).softmax(0).isnan().all()  # 0 / 0
assert torch.arange(5)[-1] == 4  # the last of five
nothing = attend(4, pad_topk(carried, 4), *covered)  # [Tp, N, R]
assert equal(nothing[:3], right) and not nothing[3].any()

only_0 = padding_choice(K, carried)[None]  # [1, 1, K]: [0, -1, -1, -1]
first = torch.cat([carried, only_0])  # [Tp, 1, K]
latent[0, 0] = 1.0  # let the dummy page hold ones at position 0
one = attend(4, first, *covered)  # [Tp, N, R]
assert equal(one[:3], right) and equal(one[3], torch.ones_like(one[3]))
latent[0, 0] = 0.0
assert OPEN_POINTS["sfa-empty-row"].safe.startswith("zeros")

# %% [markdown] tags=["en"]
# That a row of -1 gives zeros is written in no document. The operator's published test says so, and no device has told
# us: it is the open point `sfa-empty-row`. So a covered row of trueup never consists of -1 only.
#
# And if there are *more* index rows than queries? A slice would make the counts agree. It would also hide that they are
# of another batch, as above. Upstream asserts, and we refuse:

# %% [markdown] tags=["zh"] pair="056186-9b3b69"
# “全 -1 的行结果为零”没有写在任何文档里。算子公开的测试是这样做的，但没有设备证实过：这就是未决点 `sfa-empty-row`。
# 所以在 trueup 里，有主人的行从不会全是 -1。
#
# 如果索引行比查询*多*呢？切一刀，个数就相等了，同时也掩盖了它们属于另一个 batch 的事实，就像前面那样。
# 上游用断言拦住，我们也拒绝：

# %% tags=["raises-exception"] raises="ValueError" says="more than the 4 asked for"
pad_topk(alone[:5], 4)

# %% [markdown] tags=["en"]
# **What the repair leaves open.** The field with the query lengths, `actual_seq_lengths_q`, is set in the modes for
# verification, draft-extend, decoding and idle ranks. In a prompt forward it keeps its default, None, and whoever wants
# such a list there must make one. Nothing is broken. But the next mode, or the next reader, can forget, and a second
# description of the batch is back. The wish: *each list is set in every mode.* And there are still two repairs in two
# places for one cause: the plan comes before the padding.
#
# ## By construction: real and padded sizes, settled once
#
# [`plan`][trueup.core.plan] takes the agreed number of rows as an argument. So there is no "after the plan" in which
# anybody could pad. The fourth request of W rows is a dummy: it has an entry in every list.

# %% [markdown] tags=["zh"] pair="b01a20-651124"
# **修完之后还剩什么。** 查询长度的字段 `actual_seq_lengths_q`，在验证、扩展（draft-extend）、解码和空闲这几种模式下会赋值；
# 在提示词的前向里，它仍是默认值 None，谁在那里需要这个列表，就得自己再造一份。眼下并没有坏。但下一种模式、下一处读取可能会忘，
# 于是又冒出第二份对 batch 的描述。我们的要求是：*每个列表在每种模式下都有值*。而且原因只有一个（规划做在了填充之前），
# 现在却是两处各修一次。
#
# ## 从构造上保证：真实大小与填充后的大小，一次定下
#
# [`plan`][trueup.core.plan] 把约定的行数当作参数，所以不存在“规划之后”的时刻让人去填充。第四个 W 行的请求是哑请求，
# 它在每个列表里都有一项。

# %%
def batch(mode, cached, new, requests=(0, 1, 2), **padding):
    parts = zip(requests, cached, new, strict=True)
    work = [Work(r, mode, start, length, (r + 1,)) for r, start, length in parts]
    return plan(work, page_size=P, **padding)


verify = materialise(batch(Mode.VERIFY, (6, 2, 9), (W, W, W), rows=12), pools)
seg = verify.segments[0]
assert seg.q_cum_device.tolist() == seg.q_cum == [3, 6, 9, 12]
assert seg.kv_lens_device.tolist() == seg.kv_lens == [9, 5, 12, 3]
assert seg.block_table.tolist() == [[1], [2], [3], [0]]
with rules():
    chosen = choose(iq, iw, K, verify, pools, layer=0)  # Rows of [Tp, 1, K]
assert torch.equal(chosen.tensor[:9], alone)
assert (chosen.tensor[9:, 0, 0] >= 0).all()  # the dummy's rows chose, too

# %% [markdown] tags=["en"]
# ## Every list, in every mode
#
# The wish above, as a table. Each mode has three requests (IDLE none), padded to a bucket of four where rows are
# covered. No cell is empty, and the two homes of a list, host and device, are made from one tuple.

# %% [markdown] tags=["zh"] pair="135af4-17acd2"
# ## 每种模式都有每个列表
#
# 把上面的要求列成表。每种模式三个请求（IDLE 没有），策略为 COVER 的填充到大小为 4 的桶。没有一格是空的；
# 每个列表在主机和设备上各有一份，由同一个元组生成。

# %% tags=["fold"]
from IPython.display import HTML

one_row, cached = (1, 1, 1), (6, 2, 9)
modes = {Mode.DECODE: (cached, one_row), Mode.VERIFY: (cached, (W, W, W)),
         Mode.DRAFT: ((9, 3, 11), one_row), Mode.DRAFT_EXTEND: (cached, (W, W, W)),
         Mode.EXTEND: (cached, (3, 3, 3)), Mode.PREFILL: ((0, 0, 0), (9, 5, 12)),
         Mode.IDLE: ((), ())}
views = {mode: materialise(batch(mode, *parts, range(len(parts[0])), buckets=(4,)), pools)
         for mode, parts in modes.items()}
lines = []
for mode, view in views.items():
    s = view.segments[0]
    cells = (mode.value, s.segment.policy.value, s.q_cum, s.kv_lens, s.block_table.tolist())
    lines.append("<tr>" + "".join(f"<td><code>{cell}</code></td>" for cell in cells) + "</tr>")
heads = (("mode", "模式"), ("policy", "策略"), ("q_cum", "q_cum"), ("kv_lens", "kv_lens"),
         ("block table", "块表"))
head = "".join(f'<th><span lang="en">{en}</span><span lang="zh">{zh}</span></th>'
               for en, zh in heads)
HTML(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>")

# %%
for view in views.values():
    s = view.segments[0]
    B = len(s.q_cum)  # what the operators count
    assert B == len(s.kv_lens) == len(s.block_table) == len(s.prefix_cum) >= 1
    assert s.q_cum == s.q_cum_device.tolist()
    assert s.kv_lens == s.kv_lens_device.tolist()
    assert s.q_cum[-1] == s.rows.stop - s.rows.start == len(s.slots)

# %% [markdown] tags=["en"]
# ## Positions know their forward
#
# Lists that agree do not yet help against foreign rows. So `choose` returns [`Rows`][trueup.core.Rows]: the tensor
# together with the layout of its forward. `sparse`, which makes the second call, wants the *same* layout: the same
# object, not equal numbers. Two forwards with the very same lists (`weight` is the identity in place of a model's
# projections):

# %% [markdown] tags=["zh"] pair="f4c91b-397e84"
# ## 位置记得自己的前向
#
# 列表一致，还防不住别人的行。所以 `choose` 返回 [`Rows`][trueup.core.Rows]：张量，连同它那次前向的布局。
# 发出第二次调用的 `sparse` 要求布局是*同一个*：同一个对象，而不是数字相等。下面是两次前向，列表完全一样
# （`weight` 是单位矩阵，代替模型的投影）：

# %%
draft = (Mode.DRAFT, (9, 3, 11), (1, 1, 1))
now, later = (materialise(batch(*draft, buckets=(4,)), pools) for _ in range(2))
assert now.segments[0].kv_lens == later.segments[0].kv_lens == [10, 4, 12, 1]
weight = torch.eye(R).repeat(N, 1, 1).to(device, dtype)  # [N, R, R]


def ours(view, chosen):
    Tp = view.layout.padded_tokens
    with rules():
        return sparse(q[:Tp], q_rope[:Tp], weight, weight, 0.3,
                      view, view.segments[0], chosen, latent, rope)


with rules():
    chosen = choose(iq[:4], iw[:4], K, now, pools, layer=0)  # Rows of [Tp, 1, K]
assert ours(now, chosen).shape == (4, N, R)

# %% tags=["raises-exception"] raises="ValueError" says="rows of another forward"
ours(later, chosen)  # 4 rows for 4 rows, and yet refused

# %% [markdown] tags=["en"]
# ## Crossing by request
#
# Reusing a choice is legal, and then it has to cross from one layout to the other. One function does that,
# `for_layout`. What it takes has no padding and no row numbers: a mapping from request id to rows. Rows of padding get
# the choice that we give it, here `[0, -1, -1, -1]`.

# %% [markdown] tags=["zh"] pair="31027b-d0f183"
# ## 按请求交接
#
# 沿用选好的位置是合法的，那就得从一个布局换到另一个布局。做这件事的只有一个函数：`for_layout`。
# 它收到的东西没有填充，也没有行号，只是从请求 id 到行的映射。填充行用我们给它的选择，这里是 `[0, -1, -1, -1]`。

# %%
by_request = {0: alone[2:3], 1: alone[3:4], 2: alone[7:8]}  # [1, 1, K] each
crossed = for_layout(by_request, later.layout, padding_choice(K, alone))  # Rows
assert equal(ours(later, crossed)[:3], right)
assert crossed.tensor[3].tolist() == [[0, -1, -1, -1]]

# %% [markdown] tags=["en"]
# Now [SB-19](../bugs.md#sb-19) (sglang issue #30854): of four requests, request 1 finishes. There the carried index
# rows stayed four, and the engine crashed. If request 4 joins in the same round, it does not crash, and it is worse.
# Let request r have chosen position r:

# %% [markdown] tags=["zh"] pair="45cf5f-b0478f"
# 再看 [SB-19](../bugs.md#sb-19)（sglang issue #30854）：四个请求里，请求 1 结束了，携带的索引行却还是四行，引擎崩溃。
# 如果同一轮里正好有请求 4 加入，就不会崩溃，反而更糟。设请求 r 选的是位置 r：

# %%
carry = {r: int32([[[r, -1, -1, -1]]]) for r in range(4)}  # [1, 1, K] each
by_number = torch.cat([*carry.values()])  # [4, 1, K]
del carry[1]
carry[4] = int32([[[4, -1, -1, -1]]])  # what its prompt left
after = batch(Mode.DRAFT, (5, 5, 5, 5), (1, 1, 1, 1), (0, 2, 3, 4), buckets=(6,))
rows = for_layout(carry, after, padding_choice(K, by_number))  # Rows of [Tp, 1, K]

assert after.requests == (0, 2, 3, 4)
assert rows.tensor[:, 0, 0].tolist() == [0, 2, 3, 4, 0, 0]
assert by_number[:, 0, 0].tolist() == [0, 1, 2, 3]  # four for four, three foreign

# %% tags=["fold"]
boxes([("request", ["#0", "#2", "#3", "#4", ("dummy", "pad"), ("dummy", "pad")]),
       ("carried by number", ["r0", ("r1", "bad"), ("r2", "bad"), ("r3", "bad")]),
       ("carried by request", ["r0", "r2", "r3", "r4", *[("0, -1..", "pad")] * 2])],
      ("One request has left, one has joined. "
       "By number the count is right and three rows are not.",
       "一个请求离开，一个请求加入。按行号携带，个数是对的，三行的内容是错的。"))

# %% [markdown] tags=["en"]
# ## On a model
#
# glm-5-nano is a trained model with K = 64 and an indexer in each layer, the MTP layer included. What its draft steps
# attend to is a policy, `DraftReuse`:
#
# - OWN: each step chooses for itself.
# - FROZEN: all steps attend to what the last kept row chose, as in sglang. Positions drafted since are not among them.
# - GROWN: the same, and each step adds its own position.
#
# `SharedChoiceDrafter` does the last two, with the `for_layout` of above. Five requests share three places, so they
# finish and join all the time, and forwards that decode, verify or draft are padded to four. All texts are longer than
# K, so the choice matters.

# %% [markdown] tags=["zh"] pair="60faed-bac618"
# ## 在模型上
#
# glm-5-nano 是训练好的模型，K = 64，每层都有索引器，MTP 层也有。它在打草稿时看什么位置，由策略 `DraftReuse` 决定：
#
# - OWN：每一步自己选。
# - FROZEN：所有步都看最后一个保留行选的位置，sglang 就是这样。此后打出的草稿的位置不在其中。
# - GROWN：同上，但每一步加上自己的位置。
#
# 后两种由 `SharedChoiceDrafter` 实现，用的就是上面的 `for_layout`。五个请求共用三个位子，不断有请求结束、加入，
# 解码、验证和打草稿的前向都填充到四个请求。文本都比 K 长，所以选什么很要紧。

# %%
import heapq
import inspect
import queue
import shlex
import string
import textwrap

from trueup.core import Engine, EngineConfig, ledger
from trueup.core.attention.choices import DraftReuse
from trueup.core.sampling import SamplingParams
from trueup.core.speculation.acceptance import Acceptance
from trueup.core.speculation.shared_choice import SharedChoiceDrafter
from trueup.models import LLM
from trueup.models.drafters import SparseMtpDraft, mtp_drafter

llm = LLM.from_pretrained("glm-5-nano", progress=False)
nano = llm.model
modules = (textwrap, shlex, heapq, string, queue)  # it was trained on such text
sources = [inspect.getsource(module)[1000:1600] for module in modules]
prompts = [llm.tokenizer.encode(source) for source in sources]
assert min(map(len, prompts)) > 2 * nano.config.indexer.topk

# %%
from collections import Counter
from dataclasses import replace

LI = "npu_lightning_indexer"


def run(drafter):
    """Texts by request, acceptance, and the indexer's calls by mode in one round."""
    engine = Engine(nano, EngineConfig(max_requests=3, buckets=(4,)), drafter)
    for ids, length in zip(prompts, (20, 8, 20, 14, 12), strict=True):
        engine.add(ids, SamplingParams(max_tokens=length, ignore_eos=True))
    texts, done = {r: () for r in engine.scheduler.requests}, [engine.step()]
    with ledger.record(engine) as led:  # of the second round
        done.append(engine.step())
    while engine.has_work:
        done.append(engine.step())
    for step in done:
        for r, tokens in step.tokens.items():
            texts[r] += tuple(tokens)
    calls = Counter(call.mode for call in led.only(operator=LI).calls)
    return texts, Acceptance.of(done), calls

# %%
plain, _, _ = run(None)

# %%
found = {}
for reuse in DraftReuse:
    nano.reuse = replace(nano.reuse, drafts=reuse)
    found[reuse.name] = run(mtp_drafter(nano, 3))
assert all(texts == plain for texts, _, _ in found.values())

# %% [markdown] tags=["en"]
# To see what the bug does, we put it back: `ByNumber` gives each request the row of its neighbour.

# %% [markdown] tags=["zh"] pair="1e5d28-a1eea6"
# 为了看清这个缺陷的后果，我们把它放回来：`ByNumber` 让每个请求拿到邻居的行。

# %%
class ByNumber(SharedChoiceDrafter):
    def _forward(self, next_tokens, hidden, view):
        if view.layout.segments[0].mode is Mode.DRAFT:
            ids = view.layout.requests
            rows = [self._chosen[r] for r in ids]
            self._chosen |= dict(zip(ids, rows[1:] + rows[:1], strict=True))
        return super()._forward(next_tokens, hidden, view)


found["by number"] = run(ByNumber(SparseMtpDraft(nano), 3, grow=False))
for name, (texts, accepted, calls) in found.items():
    depths = ", ".join(f"{share:.2f}" for share in accepted.by_depth)
    drafting = calls[Mode.DRAFT]
    print(f"{name:<10} indexer in draft steps: {drafting}   kept by depth: {depths}")
    assert texts == plain  # the text is the target's, whoever drafts
    assert drafting == (2 if name == "OWN" else 0)

# %% [markdown] tags=["en"]
# All runs gave the same text. The three policies keep nearly the same drafts, and two of them skip the indexer. The
# first draft needs no draft step; its share moves only because the rounds begin at other places. From the second on,
# foreign rows cost acceptance, and acceptance is the only thing that shows it.

# %% [markdown] tags=["zh"] pair="92d2e8-1f7541"
# 每次运行的文本都相同。三种策略保留的草稿差不多，其中两种省掉了索引器。第一个草稿不需要草稿步，它的比例有变动，
# 只是因为各轮的起点不同了；从第二个起，别人的行就拉低了接受率。能看出毛病的，也只有接受率。

# %%
shares = {name: sum(accepted.by_depth[1:]) for name, (_, accepted, _) in found.items()}
broken = shares.pop("by number")
assert max(shares.values()) - min(shares.values()) < 0.4
assert broken < min(shares.values()) - 0.1

# %% [markdown] tags=["en"]
# ## What real engines do
#
# - sglang on NPUs (`python/sglang/srt/hardware_backend/npu/attention/ascend_backend.py`): as repaired above, rows behind
#   the last length and index rows of -1. Another pull request of the same day, #32762, cut the queries to the real rows
#   instead and put zeros back behind the result: TRIM of [chapter 2](ch02_shapes.md), for one attention path. It was
#   closed. What was merged is neither TRIM nor COVER: the rows go in, and nobody owns them.
# - sglang on GPUs has close relatives. PR #33059, on AMD: queries padded, lengths real. PR #30378: a dummy had one key
#   and six query rows, so its first row saw 1 - 6 + 1 = -4 keys; the kernel read the number as unsigned: over four
#   billion. (A dummy of trueup has as many keys as rows.)
# - vllm-ascend runs both operators over all padded rows, with lists of as many requests, so that counts agree.
#
# ## A check list for your engine
#
# 1. Write down the first axis of the five tensors at each call, with a full batch, and with one padded row. Do they
#    count the same batch?
# 2. Which function pads? Does any list of lengths exist before it has run?
# 3. Search for query lengths that are made from a tensor's shape (`arange(W, rows + 1, W)`). That is a second plan.
# 4. Search for slices of index tensors, `[:n]`. What says that these n rows are the wanted ones?
# 5. For each field of the metadata: in which modes is it set? What does a reader get in the others, None or the last
#    batch's?
# 6. What outlives a forward? Is it kept by request id or by row number? Do finish, join and reorder reach all of it?
# 7. Which rows does nobody own, and who cuts their results off? Which rows does a dummy own, and what do they choose?
# 8. Do tests have W above 1, unequal ranks, one request that leaves and another that joins in the same round?
# 9. Is acceptance by depth watched, and compared with draft steps that choose for themselves? Nothing else shows
#    foreign rows.
#
# ## Exercises
#
# **1.** A toy engine. With 9 rows it works, with 12 it does not. Which one line is the bug? Mend it twice: as upstream
# did, and so that each row has an owner.

# %% [markdown] tags=["zh"] pair="9ab67b-5b1124"
# ## 真实引擎怎么做
#
# - NPU 上的 sglang（`python/sglang/srt/hardware_backend/npu/attention/ascend_backend.py`）：修好之后就是上面的样子，
#   最后一个长度之后还有行，索引行补 -1。同一天提交的另一个 PR #32762 走的是另一条路：
#   把查询切到真实的行，算完再在结果后面补零，也就是[第 2 章](ch02_shapes.md)的 TRIM，只用在一条注意力路径上；它没有合入。
#   合入的这个既不是 TRIM 也不是 COVER：填充行照样送进去，却没有主人。
# - GPU 上的 sglang 也有同类的缺陷。PR #33059：AMD 上，查询填充过，长度却是真实的。PR #30378：
#   哑请求有一个键、六个查询行，第一行看得到 1 - 6 + 1 = -4 个键，内核按无符号数读，成了四十多亿。
#   （trueup 的哑请求，键与行一样多。）
# - vllm-ascend 让两个算子都在全部填充后的行上运行，列表的请求数也跟着填充，所以各处一致。
#
# ## 给你的引擎用的检查清单
#
# 1. 写下每次调用里五个张量的第一个轴，满载时写一次，有一行填充时写一次。它们数的是同一个 batch 吗？
# 2. 填充由哪个函数做？它运行之前，有没有哪个长度列表已经存在？
# 3. 搜一搜，有没有从张量形状推出来的查询长度（`arange(W, rows + 1, W)`）。那就是第二份规划。
# 4. 搜一搜对索引张量的切片 `[:n]`。凭什么说这 n 行就是要的那几行？
# 5. 元数据的每个字段，在哪些模式下赋值？在别的模式下，读到的是 None，还是上一个 batch 的？
# 6. 哪些东西在一次前向之后还要用？按请求 id 存放，还是按行号？结束、加入、重排，每一样都动到它了吗？
# 7. 哪些行不归任何请求，谁来切掉它们的结果？哪些行归哑请求，它们选什么？
# 8. 测试里有没有 W 大于 1、各 rank 请求数不等、同一轮里一个请求离开而另一个加入？
# 9. 有没有盯着每个深度的接受率，并与“每步自己选”对比？别人的行，只有在这里看得出来。
#
# ## 练习
#
# **1.** 一个玩具引擎：9 行时正常，12 行时不行。有毛病的是哪一行代码？用两种办法修：一种照上游的做法，一种让每一行都有主人。

# %%
class Toy:
    """Chooses for W rows of each request; all ranks have agreed on a number of rows."""

    def __init__(self, kv_lens, table):
        self.kv_lens, self.table = kv_lens, table

    def plan(self):
        self.lists = dict(kv_lens=self.kv_lens, table=self.table)

    def pad(self, agreed):
        self.rows = agreed

    def choose(self):
        q_cum = [*range(W, self.rows + 1, W)]
        return select(self.rows, q_cum, **self.lists)

    def forward(self, agreed):
        self.plan()
        self.pad(agreed)
        return self.choose()


assert torch.equal(Toy([9, 5, 12], table).forward(9), alone)

# %% tags=["raises-exception"] raises="ContractError" says="3 lengths, [3] int32"
Toy([9, 5, 12], table).forward(12)

# %% [markdown] tags=["en", "solution"]
# It is the line that makes `q_cum`: it counts requests in a tensor's rows. Swapping `plan` and `pad` does not help, for
# `plan` would not know of the padding. Upstream's way: the plan makes all three lists, from the requests. The other
# way: the plan is told the number of rows, and gives those that are left to a dummy.

# %% [markdown] tags=["zh", "solution"] pair="d4b275-dda0bb"
# 是生成 `q_cum` 的那一行：它从张量的行数去数请求。把 `plan` 和 `pad` 对调没有用，因为 `plan` 还是不知道有填充。
# 上游的办法：三个列表都由规划按请求生成。另一种办法：把行数告诉规划，由它把多出来的行分给哑请求。

# %% tags=["solution"]
class Upstream(Toy):
    def plan(self):
        super().plan()
        self.lists["q_cum"] = [W * (i + 1) for i in range(len(self.kv_lens))]

    def choose(self):
        return select(self.rows, **self.lists)


class Covered(Upstream):
    def forward(self, agreed):
        spare, self.rows = agreed - W * len(self.kv_lens), agreed
        dummies = [W] * (spare // W) + [spare % W] * (spare % W > 0)
        q_lens = [W] * len(self.kv_lens) + dummies
        ends = [sum(q_lens[: i + 1]) for i in range(len(q_lens))]
        self.lists = dict(q_cum=ends, kv_lens=self.kv_lens + dummies,
                          table=self.table + [[0]] * len(dummies))
        return self.choose()


for mended in (Upstream, Covered):
    assert torch.equal(mended([9, 5, 12], table).forward(12)[:9], alone)
eleven = Covered([9, 5, 12], table).forward(11)  # [Tp, 1, K], two rows left: a narrower dummy
assert (eleven[9:, 0, 0] >= 0).all()

# %% [markdown] tags=["en"]
# **2.** Under GROWN a request with 3 keys has chosen `[0, 2, -1, -1]`. Its draft steps stand at positions 3, 4 and 5.
# What does each attend to? And under FROZEN, which of its keys does the step at position 5 miss?

# %% [markdown] tags=["zh"] pair="37e912-3f87e8"
# **2.** 策略是 GROWN，一个有 3 个键的请求选了 `[0, 2, -1, -1]`。它的几个草稿步在位置 3、4、5。每一步看哪些位置？
# 如果是 FROZEN，位置 5 的那一步看不到哪些键？

# %% tags=["solution"]
row, seen = int32([[[0, 2, -1, -1]]]), []  # [T, 1, K]
for position in (3, 4, 5):
    row = grown(row, torch.tensor([position], device=device))  # [T, 1, K]
    seen.append(row.flatten().tolist())
assert seen == [[3, 0, 2, -1], [4, 3, 0, 2], [5, 4, 3, 0]]  # full: the worst, the last, goes
assert set(range(6)) - {0, 2} == {1, 3, 4, 5}  # FROZEN misses the drafted ones, its own, too

# %% [markdown] tags=["en"]
# **3.** Do the silent slice with trueup's functions: let `wide` be the choice of the verify forward, and try to hand its
# first three rows to a draft forward without padding. Where does it stop? Is there a way around?

# %% [markdown] tags=["zh"] pair="a874f4-7a6121"
# **3.** 用 trueup 的函数重做那次不声不响的切片：`wide` 是验证前向选出的位置，试着把它的前三行交给一次没有填充的打草稿的前向。
# 在哪里会被拦住？有没有办法绕过去？

# %% tags=["solution"]
from trueup.core import Rows
from trueup.core.rows import Kind

with rules():
    wide = choose(iq, iw, K, verify, pools, layer=0)  # Rows of [Tp, 1, K]


def stopped(action):
    try:
        action()
    except ValueError as error:
        return str(error)


bare = materialise(batch(*draft), pools)  # three rows
assert "another forward" in stopped(lambda: ours(bare, wide))
few = wide.tensor[:3]  # [3, 1, K]
refusal = stopped(lambda: Rows(Kind.TOKEN, verify.layout, few))
assert "3 token rows for a layout with 12" in refusal
claimed = Rows(Kind.TOKEN, bare.layout, few)
assert stopped(lambda: ours(bare, claimed)) is None

# %% [markdown] tags=["en", "solution"]
# The way around is to claim in so many words that the rows are those of the draft forward. No type can check that. So
# in trueup only `choose` and `for_layout` bind positions to a layout, and a reviewer has two places to read.

# %% [markdown] tags=["zh", "solution"] pair="7db68a-a7089d"
# 能绕过去的办法，是白纸黑字地声称这些行就属于打草稿的前向；这一点任何类型都查不出来。所以在 trueup 里，
# 只有 `choose` 和 `for_layout` 会把位置绑定到布局上，审查时只需要看这两处。

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# The same cells are meant to run there, with real widths and `audit`, so that the wrong calls stop before a kernel gets
# them. A device could settle both open points of this chapter: what stands in rows behind the last length, and what a
# row of -1 yields. No device has run it yet: see [what ran where](../what-ran-where.md).

# %% [markdown] tags=["zh"] pair="50959b-ec56c1"
# ## 在 NPU 机器上
#
# 同样的单元格按设计在那里也能运行，用真实宽度和 `audit`，错误的调用在到达内核之前就停下。本章的两个未决点要由设备来回答：
# 最后一个长度之后的行里是什么，全 -1 的行结果是什么。本章还没有在任何设备上运行过，见[哪些在哪里跑过](../what-ran-where.md)。
