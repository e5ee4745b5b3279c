# ---
# title:
#   en: "8. Reading an operator"
#   zh: "8. 读懂一个算子"
# outcome:
#   en: from one contract sheet you build a call that is right, and from a refused call you find out what to change
#   zh: 能照着一张契约页写出正确的调用，也能从一次被拒绝的调用查出该改什么
# minutes: 18
# prerequisites:
#   en: "[chapter 4](ch04_operators.md) (contracts); pages and absorbed MLA, from chapters [3](ch03_cache.md) and [5](ch05_mla.md)"
#   zh: "[第 4 章](ch04_operators.md)（契约）；[第 3 章](ch03_cache.md)的页，[第 5 章](ch05_mla.md)的吸收式 MLA"
# bugs: [SB-01, SB-02, SB-29]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** A schema names the arguments of an operator and their types. It says nothing of what must agree. Every
# operator therefore has a *contract sheet* in this book: one page with all the rules that a call is held to. From it
# you can build a call, and see why another one was refused.
#
# The example is sparse attention, which DeepSeek-V3.2 and GLM-5 use. A query row attends to some of the keys it may
# see, not to all. First a cheap operator, `npu_lightning_indexer` (*LI*, the *indexer*), scores the keys and keeps the
# best `K` of each row. Then `npu_sparse_flash_attention` (*SFA*) attends to these only. The rest is absorbed MLA, as in
# [chapter 5](ch05_mla.md): one latent is both key and value.
#
# The indexer hands SFA an *index row* for each query row. Its entries are **places in the request**, counted from 0,
# and no slots: SFA looks in the block table for the page of a place. In this picture a page holds 4 tokens, and the
# request has pages 3 and 5.

# %% [markdown] tags=["zh"] pair="8cefd0-b183cc"
# **要点。** schema 列出算子的参数和类型，却不说哪些东西必须一致。所以本书为每个算子准备了一张*契约页*：
# 一次调用要遵守的全部规则都在这一页上。照着它可以写出调用，也能看出别的调用为什么被拒绝。
#
# 例子取 DeepSeek-V3.2 和 GLM-5 所用的稀疏注意力：一个查询行能看到许多键，但只对其中一部分做注意力。
# 先由一个开销很小的算子 `npu_lightning_indexer`（下称 *LI*，即*索引器*）给键打分，每行留下最好的 `K` 个；
# 再由 `npu_sparse_flash_attention`（下称 *SFA*）只对这些键做注意力。
# 其余部分就是[第 5 章](ch05_mla.md)的吸收式 MLA：同一个潜变量既是键又是值。
#
# 索引器交给 SFA 的，是每个查询行一条的*索引行*。其中每一项都是**请求内的位置**，从 0 数起。
# 它不是槽位：SFA 要查块表，才知道这个位置在哪一页。下图中一页 4 个词元，这个请求的页是 3 和 5。

# %% tags=["fold"]
from trueup.core.picture import boxes

P, pages, index_row = 4, [3, 5], [6, 0, 3, -1]
chosen = [place for place in index_row if place >= 0]
end = [("", "pad")]
boxes([("index row [K]", [str(place) for place in chosen] + [("-1", "pad")]),
       ("page", [str(pages[place // P]) for place in chosen] + end),
       ("row of the page", [str(place % P) for place in chosen] + end)],
      ("An index row that keeps places 6, 0 and 3 of a request. Its -1 stands for nothing.",
       "一条索引行，选中请求里的位置 6、0、3。其中的 -1 什么也不表示。"))

# %%
slots = [pages[place // P] * P + place % P for place in chosen]
assert slots == [22, 12, 15]

# %% [markdown] tags=["en"]
# ## The sheet
#
# Open the [sheet of SFA](../operators/npu_sparse_flash_attention.md) beside this page; that of the
# [indexer](../operators/npu_lightning_indexer.md) is built the same way. Read a sheet in this order:
#
# | section | its question |
# |---|---|
# | the first lines | what does it compute, and what does it leave unwritten? |
# | Schema | which arguments are there, of which types, with which defaults? |
# | Tensors | which axes has each? It depends on the *form*, so choose the form first |
# | Lengths | a host list or a tensor, and what is an element? |
# | Rules | when is a call refused? Relations first, then sizes, then dtypes; and where is that written? |
# | Open points, if any | what has nobody settled? |
#
# The rules are read from the source of the checks, so a sheet says just what is checked. Python has them as data:

# %% [markdown] tags=["zh"] pair="84a333-dd74ce"
# ## 契约页
#
# 请把 [SFA 的契约页](../operators/npu_sparse_flash_attention.md)打开放在旁边；
# [索引器的契约页](../operators/npu_lightning_indexer.md)结构相同。按这个顺序读：
#
# | 小节 | 回答什么 |
# |---|---|
# | 开头几行 | 算什么，哪些地方不写入？ |
# | Schema | 有哪些参数，什么类型，默认值是什么？ |
# | 张量 | 各有哪些轴？取决于调用的*形式*，所以先选定形式 |
# | 长度 | 是主机列表还是张量，每一项指什么？ |
# | 规则 | 什么时候拒绝调用？先是关系，再是大小和数据类型；出处在哪里？ |
# | 未决点（有的话） | 哪些问题还没有定论？ |
#
# 规则直接从检查代码的源码读出，所以契约页写的就是实际检查的。在 Python 里，它们也是数据：

# %%
from collections import Counter

from trueup.core import ContractError, audit, capture, load, pad_topk
from trueup.core.device import pick_device
from trueup.core.ops.contract import OPEN_POINTS, assume, profile
from trueup.core.ops.registry import OPERATORS
from trueup.core.ops.reading.rules import rules

load()

import torch

npu = torch.ops.npu
SFA, LI = "npu_sparse_flash_attention", "npu_lightning_indexer"
levels = Counter(rule.level for rule in rules(SFA))
print(dict(levels))
assert levels["RELATION"] > levels["SIZE"] + levels["DTYPE"]

# %% [markdown] tags=["en"]
# More than half are relations: rows, counts and lengths that must agree. A rule has the parts of a ContractError, and
# `condition`, the column *refused when*. It is Python: where it is true, the call is refused.

# %% [markdown] tags=["zh"] pair="0ba0f2-eeade0"
# 一半以上是关系：必须一致的行数、个数和长度。一条规则除了 ContractError 的那几项，还有 `condition`，
# 就是契约页上的“何时拒绝”一列。它是 Python 代码：值为真，调用就被拒绝。

# %%
[rule] = [rule for rule in rules(SFA) if rule.argument == "attention_mode"]
print(rule.level, "|", rule.expected, "|", rule.condition)
assert eval(rule.condition, {"attention_mode": 0})
assert not eval(rule.condition, {"attention_mode": 2})

# %% [markdown] tags=["en"]
# ## What the schema leaves out
#
# By its schema, SFA needs five arguments; each of the others has a default.

# %% [markdown] tags=["zh"] pair="e3deb4-debf85"
# ## schema 没有说的
#
# 只看 schema，SFA 给五个参数就够，其余都有默认值。

# %%
schema = getattr(npu, SFA).default._schema
arguments = schema.arguments
required = [a.name for a in arguments if not a.has_default_value()]
defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

assert required == ["query", "key", "value", "sparse_indices", "scale_value"]
assert defaults["block_table"] is defaults["actual_seq_lengths_kv"] is None
assert defaults["attention_mode"] == 0  # which the rule above refuses

# %% [markdown] tags=["en"]
# Now a batch. Request A has 3 query rows (a token and two drafts) and 7 cached keys, these three included. Request B
# has 1 row and 3 keys. We choose the form that serving engines use: queries in layout TND, the rows of all requests one
# after the other; keys in layout `PA_BSND`, in pages. For this form the sheet says the axes. On a laptop the widths are
# numbers that fit on a page.

# %% [markdown] tags=["zh"] pair="7d473c-388f34"
# 现在来一个 batch。请求 A 有 3 个查询行（一个词元加两个草稿词元），缓存里有 7 个键，这三个也算在内。请求 B 有 1 行和 3 个键。
# 形式选推理引擎所用的那种：查询是 TND 布局，所有请求的行首尾相接；键是 `PA_BSND` 布局，存在页里。
# 选定形式，契约页就给出各个轴。在笔记本电脑上，宽度取一页纸写得下的数。

# %%
device = pick_device()
real = dict(R=512, Dr=64, D=128, P=16, dtype=torch.bfloat16)
small = dict(R=8, Dr=4, D=4, P=4, dtype=torch.float32)
sizes, scale, atol = small, 1 / 4, 1e-5
if device.type == "npu":
    sizes, scale, atol = real, 1 / 16, 5e-2


def checked():  # the rules of a device, or of numbers that fit on a page: chapter 4
    return audit() if device.type == "npu" else profile("paper")


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=device)

# %%
def tensors(R, Dr, D, P, dtype):
    """Those of SFA, and those of the indexer: 8 heads and keys of its own."""
    def random(*shape):
        return torch.randn(*shape).to(device, dtype)

    torch.manual_seed(0)
    latent = random(6, P, 1, R)  # [pages, P, 1, R]
    sparse = dict(
        query=random(4, 2, R), query_rope=random(4, 2, Dr),  # [T, N, R], [T, N, Dr]
        key=latent, value=latent, key_rope=random(6, P, 1, Dr),  # [pages, P, 1, Dr]
    )
    indexer = dict(
        query=random(4, 8, D), weights=random(4, 8),  # [T, N, D], [T, N]
        key=random(6, P, 1, D),  # [pages, P, 1, D]
    )
    return sparse, indexer

# %% [markdown] tags=["en"]
# The indexer comes first. What it calls `key`, SFA calls `kv`: `actual_seq_lengths_key`, `layout_key`.

# %% [markdown] tags=["zh"] pair="dd4d64-5f320f"
# 先调用索引器。它的参数名里写 `key` 的地方，SFA 写 `kv`：比如这里的 `actual_seq_lengths_key`、`layout_key`。

# %%
sparse, indexer = tensors(**sizes)
table, kv_lengths = int32([[3, 5], [1, 0]]), int32([7, 3])  # [B, columns], [B]
both = dict(block_table=table, actual_seq_lengths_query=int32([3, 4]),
            layout_query="TND")
paged = dict(actual_seq_lengths_key=kv_lengths, layout_key="PA_BSND")
asking = indexer | both | paged


def choose(sparse_count):
    with checked():
        return getattr(npu, LI)(**asking, sparse_count=sparse_count)[0]  # [T, 1, K]


topk = choose(sparse_count=4)  # [T, 1, K]
print(topk[:, 0].tolist())
of_b = topk[3, 0].tolist()  # request B
assert topk.shape == (4, 1, 4) and topk.dtype == torch.int32
assert sorted(of_b) == [-1, 0, 1, 2] and of_b[-1] == -1

# %% [markdown] tags=["en"]
# The rows of A see 5, 6 and 7 keys, since a row sees no key behind its own; each keeps 4 of them. B sees 3, fewer than
# K. It keeps all, and a -1 stands behind them: the width stays K ([SB-29](../bugs.md#sb-29)).
#
# The score of a key is $\sum_n w_n\,\mathrm{relu}(q_n \cdot k)$, over the indexer's heads. By hand:

# %% [markdown] tags=["zh"] pair="2c4112-89f153"
# 一行看不到排在自己后面的键，所以 A 的三行分别看到 5、6、7 个键，各留 4 个。B 只看到 3 个，比 K 少：
# 它全部留下，后面补一个 -1，宽度仍是 K（[SB-29](../bugs.md#sb-29)）。
#
# 一个键的得分是 $\sum_n w_n\,\mathrm{relu}(q_n \cdot k)$，对索引器的各个头求和。手算一遍：

# %%
SEES = {0: (0, 5), 1: (0, 6), 2: (0, 7), 3: (1, 3)}  # row: its request, its keys


def cached(pool, request):
    return pool[table[request].long()].flatten(0, 2).cpu().double()  # [S, width]


def best(t, K):
    request, seen = SEES[t]
    query = indexer["query"][t].cpu().double()  # [N, D]
    weights = indexer["weights"][t].cpu().double()  # [N]
    keys = cached(indexer["key"], request)[:seen]  # [seen, D]
    scores = weights @ (query @ keys.T).relu()  # [seen]
    return set(scores.topk(min(K, seen)).indices.tolist())


for t in SEES:  # as sets: of equal scores, either may come first
    assert set(topk[t, 0].tolist()) - {-1} == best(t, 4)

# %% [markdown] tags=["en"]
# ## From the schema to a call
#
# Give SFA what the schema demands, and the two layouts. Then follow the refusals: each names an argument, and the next
# try has it.

# %% [markdown] tags=["zh"] pair="8b33cb-fd205e"
# ## 从 schema 到一次调用
#
# 先只给 SFA schema 要求的参数，再加上两个布局。然后跟着拒绝信息走：每次拒绝点名一个参数，下一次就把它补上。

# %%
def refusal(run):
    """The ContractError that run() raises, or None."""
    try:
        run()
    except ContractError as error:
        return error


call = sparse | both | dict(
    sparse_indices=topk, scale_value=scale, attention_mode=2,
    actual_seq_lengths_kv=kv_lengths, layout_kv="PA_BSND",
)


def sfa(arguments):
    with checked():
        return getattr(npu, SFA)(**arguments)[0]  # [T, N, R]

# %%
start = (*required, "layout_query", "layout_kv")
asked, given = [], {name: call[name] for name in start}
while error := refusal(lambda: sfa(given)):
    asked.append(error.argument)
    given[error.argument] = call[error.argument]
print(*asked, sep="\n")
assert len(asked) == 6 and given.keys() == call.keys()

# %% [markdown] tags=["en"]
# Six more, and the schema lets you leave out each of them. An argument that is absent is easy to find. Now those that
# are there, and wrong.
#
# ## Six mistakes
#
# **The mode left at its default.** The schema's default is 0, a mode that the operator does not have.

# %% [markdown] tags=["zh"] pair="e31a33-0fce8e"
# 又要了六个，而按 schema，它们个个都可以不给。缺了参数容易发现；下面看给了、但给错的。
#
# ## 六个错误
#
# **模式用了默认值。** schema 里的默认值是 0，而算子并没有这种模式。

# %% tags=["raises-exception"] raises="ContractError" says="the default 0 is refused"
def attend(**changes):
    return sfa(call | changes)  # [T, N, R]


attend(attention_mode=defaults["attention_mode"])

# %% [markdown] tags=["en"]
# **Query lengths, per request.** In TND they are ends: 3 rows and 1 row are `[3, 4]`.

# %% [markdown] tags=["zh"] pair="7182a8-29219a"
# **查询长度写成了逐请求。** TND 布局要的是终点：3 行和 1 行应写成 `[3, 4]`。

# %% tags=["raises-exception"] raises="ContractError" says="never decreasing"
attend(actual_seq_lengths_query=int32([3, 1]))

# %% [markdown] tags=["en"]
# This was luck: `[3, 1]` decreases. The first exercise has one that does not.
#
# **A host list.** FIA, the dense operator of [chapter 4](ch04_operators.md), takes its lengths as Python lists. Here
# they are tensors. Code that changes from one to the other meets this message, which is the dispatcher's own:

# %% [markdown] tags=["zh"] pair="4665b8-bc2085"
# 这次是碰巧：`[3, 1]` 变小了，所以查得出来。练习 1 里有一个不变小的。
#
# **给了主机列表。** [第 4 章](ch04_operators.md)的稠密注意力算子 FIA，长度是 Python 列表；这里则是张量。
# 从一个换到另一个时，就会遇到下面的报错，它由分发器自己发出：

# %% tags=["raises-exception"] raises="RuntimeError" says="Expected a value of type 'Optional[Tensor]'"
attend(actual_seq_lengths_query=[3, 4])

# %% [markdown] tags=["en"]
# The other way round, a tensor of lengths for FIA, is not refused. The dispatcher reads its numbers, once, and hands FIA
# a list. If you write to the tensor later, as one does between two replays of a graph, FIA does not notice.
# [`capture`][trueup.core.capture] records calls, and shows what arrives:

# %% [markdown] tags=["zh"] pair="4e0291-fea839"
# 反过来，把长度张量给 FIA，却不会被拒绝：分发器从张量里读出数（只读一次），交给 FIA 的是列表。
# 之后再往张量里写（两次重放计算图之间常这样做），FIA 毫不知情。
# [`capture`][trueup.core.capture] 会记录调用，从它那里能看到实际送到的是什么：

# %%
def dense(lengths):
    """FIA: the same attention, over all keys."""
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
    key = call["key"][:, :, 0]  # [pages, P, R]
    with checked():
        return npu.npu_fused_infer_attention_score_v2(
            call["query"], key, key,
            query_rope=call["query_rope"], key_rope=call["key_rope"][:, :, 0],
            actual_seq_qlen=lengths, actual_seq_kvlen=[7, 3],
            block_table=table, block_size=sizes["P"],
            atten_mask=mask, sparse_mode=3, softmax_scale=scale,
            num_query_heads=2, num_key_value_heads=1, input_layout="TND",
        )[0]  # [T, N, R]


with capture() as seen:
    dense(torch.tensor([3, 4]))
    attend()
of_fia, of_sfa = (recorded["arguments"] for recorded in seen.calls)
assert of_fia["actual_seq_qlen"] == [3, 4]  # a list by now
assert of_sfa["actual_seq_lengths_query"]["tensor"]["shape"] == [2]

# %% [markdown] tags=["en"]
# | operator, form | query lengths | key lengths | container |
# |---|---|---|---|
# | FIA, TND, paged keys | ends | per request | host list, stays as it was in a recorded graph |
# | LI and SFA, TND, paged keys | ends | per request | int32 tensor on the device, read at each replay |
# | LI and SFA, TND, packed keys | ends | ends | the same |
# | LI and SFA, BSND | per request, or None | per request, or None without pages | the same |
#
# For other operators there is the table of [chapter 4](ch04_operators.md).
#
# **A row too many in the block table.** It was padded to a batch of 3, and the lengths were not
# ([SB-01](../bugs.md#sb-01)).

# %% [markdown] tags=["zh"] pair="45638e-94d012"
# | 算子与形式 | 查询长度 | 键长度 | 容器 |
# |---|---|---|---|
# | FIA，TND，分页的键 | 终点 | 逐请求 | 主机列表；录进计算图后不再变 |
# | LI 和 SFA，TND，分页的键 | 终点 | 逐请求 | 设备上的 int32 张量；每次重放时读取 |
# | LI 和 SFA，TND，打包的键 | 终点 | 终点 | 同上 |
# | LI 和 SFA，BSND | 逐请求，或 None | 逐请求；不分页时可为 None | 同上 |
#
# 其他算子见[第 4 章](ch04_operators.md)的表。
#
# **块表多了一行。** 块表填充到了 3 个请求，长度却没有（[SB-01](../bugs.md#sb-01)）。

# %% tags=["raises-exception"] raises="ContractError" says="2 rows, one for each request"
attend(block_table=int32([[3, 5], [1, 0], [0, 0]]))

# %% [markdown] tags=["en"]
# **Index rows of another forward.** To save time, an engine may reuse the index rows of one forward in the draft steps
# that follow. There were 3 rows then; now the queries are padded to 4 ([SB-02](../bugs.md#sb-02)).

# %% [markdown] tags=["zh"] pair="0dd341-579187"
# **索引行来自另一次前向。** 为了省时间，引擎可能在随后的草稿步里复用前一次前向的索引行。
# 那时是 3 行，现在查询已经填充到 4 行（[SB-02](../bugs.md#sb-02)）。

# %% tags=["raises-exception"] raises="ContractError" says="4 rows, as query has"
attend(sparse_indices=topk[:3])

# %% [markdown] tags=["en"]
# [`pad_topk`][trueup.core.pad_topk] adds rows of -1, which choose nothing. It never cuts: rows that are too many are
# those of another batch. Here request A is alone, and row 3 is padding that belongs to no request.

# %% [markdown] tags=["zh"] pair="9eed01-423de0"
# [`pad_topk`][trueup.core.pad_topk] 在后面补上全 -1 的行，这样的行什么也不选。它从不裁剪：行多了，说明多出来的属于另一个 batch。
# 下面 batch 里只有请求 A，第 3 行（从 0 数起）是填充，不属于任何请求。

# %%
padded = pad_topk(topk[:3], 4)  # [T, 1, K]
alone = dict(block_table=table[:1], actual_seq_lengths_query=int32([3]),
             actual_seq_lengths_kv=int32([7]))
mended = attend(sparse_indices=padded, **alone)  # [T, N, R]
assert padded[3, 0].tolist() == [-1] * 4
assert torch.allclose(mended[:3], attend()[:3], atol=atol)

# %% [markdown] tags=["en"]
# **-1 first.** Prompts are often padded on the left. Index rows padded like that have their -1 in front:

# %% [markdown] tags=["zh"] pair="62bd90-af91e4"
# **-1 排在最前。** 提示词常在左边填充；索引行若也这样填充，-1 就排到了前面：

# %% tags=["raises-exception"] raises="ContractError" says="all choices in front"
left = topk.flip(-1)  # [T, 1, K]
attend(sparse_indices=left)

# %% [markdown] tags=["en"]
# One kernel stops at the first -1: request B would attend to nothing. Another passes over it. So the result would
# depend on the kernel, and the contract refuses. A stable sort mends it:

# %% [markdown] tags=["zh"] pair="faa7af-c10325"
# 有的内核读到第一个 -1 就停，请求 B 就什么也没看；有的内核则跳过它。结果取决于内核，所以契约拒绝。做一次稳定排序就好：

# %%
order = (left < 0).int().argsort(dim=-1, stable=True)  # [T, 1, K]
sorted_out = attend(sparse_indices=left.gather(-1, order))  # [T, N, R]
assert torch.allclose(sorted_out, attend(), atol=atol)

# %% [markdown] tags=["en"]
# ## Who finds what
#
# Shape inference, which compilers and tracers ask, takes its answer from the query alone
# ([chapter 4](ch04_operators.md) did this with FIA). Where torch_npu is installed, the cell asks torch_npu's own.

# %% [markdown] tags=["zh"] pair="0f2034-89de1d"
# ## 谁能发现什么
#
# 编译器和追踪器做的是形状推导，它只凭查询就给出答案（[第 4 章](ch04_operators.md)用 FIA 做过同样的实验）。
# 装了 torch_npu 时，下面用的是 torch_npu 自带的推导。

# %%
if not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{SFA}", "Meta"):
    shape_inference = torch.library.Library("npu", "IMPL")

    def infer(query, *others, **more):
        empty = query.new_empty(0, dtype=torch.float32)  # [0]
        return torch.empty_like(query), empty, empty.clone()

    shape_inference.impl(SFA, infer, "Meta")

# %%
def on(where, arguments):
    return {name: value.to(where) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()}


def trace(**changes):
    return getattr(npu, SFA)(**on("meta", call | changes))


def outcome(make, **changes):
    try:
        make(**changes)
    except (ContractError, RuntimeError) as error:
        return type(error).__name__
    return "passes"


assert outcome(trace) == outcome(attend) == "passes"

# %% tags=["fold"]
from IPython.display import HTML

mistakes = {
    "attention_mode = 0": dict(attention_mode=0),
    "query lengths [3, 1]": dict(actual_seq_lengths_query=int32([3, 1])),
    "query lengths as a list": dict(actual_seq_lengths_query=[3, 4]),
    "block_table: 3 rows": dict(block_table=int32([[3, 5], [1, 0], [0, 0]])),
    "sparse_indices: 3 rows": dict(sparse_indices=topk[:3]),
    "sparse_indices: -1 first": dict(sparse_indices=left),
}
found = {name: (outcome(trace, **changes), outcome(attend, **changes))
         for name, changes in mistakes.items()}
head = ('<th><span lang="en">mistake</span><span lang="zh">错误</span></th>'
        '<th><span lang="en">shape inference</span><span lang="zh">形状推导</span></th>'
        '<th><span lang="en">contract</span><span lang="zh">契约</span></th>')
body = "".join(f"<tr><td><code>{name}</code></td><td>{traced}</td><td>{called}</td></tr>"
               for name, (traced, called) in found.items())
HTML(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

# %%
by_dispatcher = found.pop("query lengths as a list")
assert by_dispatcher == ("RuntimeError", "RuntimeError")
assert set(found.values()) == {("passes", "ContractError")}

# %% [markdown] tags=["en"]
# ## What is undefined
#
# A contract must also say what nobody knows. Of the [open points](../operators/index.md#open-points), three are about
# our two operators. In each case the reference kernel does something definite, but no device has confirmed it: rely on
# none of it. The first two show in row 3 of the padded call; which one depends on whose row it is. (The third is why
# sets were compared above.)

# %% [markdown] tags=["zh"] pair="b3450a-3f22ca"
# ## 哪些是未定义的
#
# 契约还必须写明哪些事没人知道。[未决点](../operators/index.md#open-points)里有三个与这两个算子有关。
# 参考内核对每一个都有确定的做法，但没有设备证实过，所以都不能依赖。
# 前两个就出现在刚才填充过的调用的第 3 行，是哪一个，取决于这一行归谁所有。（第三个正是前面比较集合的原因。）

# %%
for name in ("rows-past-the-end", "sfa-empty-row", "li-tie-order"):
    print(f"{name}: {OPEN_POINTS[name].question}")


def reference(operator, arguments):
    """The first result of trueup's own kernel, on any machine."""
    with profile("paper"):
        return OPERATORS[operator](**on("cpu", arguments))[0]


unowned = call | alone | dict(sparse_indices=padded)
owned = call | dict(sparse_indices=padded)  # B owns row 3, which chooses nothing
nobodys = reference(SFA, unowned)[3]  # [N, R]
bs = reference(SFA, owned)[3]  # [N, R]
assert nobodys.isnan().all()  # a device leaves the memory as it was
assert not bs.any()  # zeros, as in the operator's published test

# %% [markdown] tags=["en"]
# ## A refused call, recorded
#
# So far we knew the mistake. In an engine you only know that one call among thousands failed. Put the run under
# `capture`: it writes each call to a file before the call is made, without activations and weights. Then, on any
# machine, `trueup explain calls.json` holds the calls to the rules of a device. These include sizes, so here we take
# the real ones.

# %% [markdown] tags=["zh"] pair="8223cd-7c42c9"
# ## 记录下一次被拒绝的调用
#
# 前面的错误是我们自己造的。在引擎里，你只知道成千上万次调用中有一次失败了。把那段运行放进 `capture`：
# 每次调用在执行之前就写进文件，激活值和权重不写。然后在任何一台机器上运行 `trueup explain calls.json`，
# 它按设备的规则检查这些调用。设备的规则也管大小，所以下面用真实的宽度。

# %%
def run(file, rows):
    """Both operators at real sizes, recorded; SFA gets so many of the index rows."""
    sparse, indexer = tensors(**real)
    try:
        with capture(file):
            topk, _ = getattr(npu, LI)(**(asking | indexer), sparse_count=4)
            getattr(npu, SFA)(**(call | sparse | dict(sparse_indices=topk[:rows])))
    except (ContractError, RuntimeError):  # the contract's, or a device's
        pass


run("calls.json", rows=3)

# %%
import json
import os
from pathlib import Path

from trueup.core.explain import explain, render

os.environ["COLUMNS"] = "88"  # as wide as this page
text = Path("calls.json").read_text()
findings = explain(text)  # in a shell: trueup explain calls.json
print(render(findings))
assert findings[1].title == f"{SFA} refuses sparse_indices (call 2)"
recorded = json.loads(text)["calls"][1]["arguments"]
assert "values" in recorded["block_table"]["tensor"]  # lengths, indices: yes
assert "values" not in recorded["query"]["tensor"]  # activations: no

# %% [markdown] tags=["en"]
# It says which call, which argument, both numbers, the condition that was true (`lead` is what the contract made of the
# query's axes), the bug it looks like, and the sheet to read. It also takes text: the message of a device, or a log
# ([how to](../how-to/explain.md)). With all four rows, no rule is broken:

# %% [markdown] tags=["zh"] pair="72ed67-f9270d"
# 它指出是哪次调用、哪个参数、两边各是多少、哪个条件成立（`lead` 是契约由查询的轴算出的量）、像哪个缺陷、该读哪张契约页。
# 它也接受文本：设备的报错，或者一份日志（[用法](../how-to/explain.md)）。四行都给，就没有违反任何规则：

# %%
run("mended.json", rows=4)
[finding] = explain(Path("mended.json").read_text())
assert dict(finding.rows)["broken"].startswith("no rule")

# %% [markdown] tags=["en"]
# ## The right call
#
# A call may keep all rules and still not be the one you meant. So, as in chapter 4, compute the answer a second time:
# dense attention by hand, in float64. Given index rows, it looks at the chosen keys only.

# %% [markdown] tags=["zh"] pair="94bab9-be8d82"
# ## 正确的调用
#
# 一次调用可以不违反任何规则，却不是你想要的那个意思。所以像第 4 章那样另算一遍：手写的稠密注意力，float64。
# 给它索引行，它就只看选中的键。

# %%
def by_hand(chosen=None):
    rows = []
    for t, (request, seen) in SEES.items():
        places = list(range(seen)) if chosen is None else chosen[t, 0].tolist()
        places = [place for place in places if place >= 0]
        latents = cached(call["key"], request)[places]  # [places, R]
        ropes = cached(call["key_rope"], request)[places]  # [places, Dr]
        scores = call["query"][t].cpu().double() @ latents.T  # [N, places]
        scores += call["query_rope"][t].cpu().double() @ ropes.T  # [N, places]
        rows.append((scale * scores).softmax(-1) @ latents)  # [N, R]
    return torch.stack(rows)  # [T, N, R]


def equal(a, b):
    return torch.allclose(a.cpu().double(), b.cpu().double(), atol=atol)


everything = attend(sparse_indices=choose(sparse_count=8))  # [T, N, R]
assert equal(everything, by_hand()) and equal(everything, dense([3, 4]))

# %% [markdown] tags=["en"]
# With room for 8 choices every row keeps all it may see, and SFA gives what dense attention gives, FIA's included. With
# 4, the rows of A leave keys out, and B does not: its -1 changed nothing.

# %% [markdown] tags=["zh"] pair="8eaf6c-416c30"
# 能选 8 个时，每一行都留下了它能看到的全部键，SFA 的结果与稠密注意力相同，与 FIA 也相同。
# 只选 4 个时，A 的各行舍掉了一些键，B 一个也没舍：它的 -1 没有造成任何影响。

# %%
out = attend()  # [T, N, R]
assert equal(out, by_hand(topk))
assert not any(equal(out[t], by_hand()[t]) for t in range(3))  # request A
assert equal(out[3], by_hand()[3])  # request B

# %% [markdown] tags=["en"]
# ## What real engines do
#
# - vllm-ascend (`vllm_ascend/attention/sfa_v1.py`) calls both operators in the form of this chapter, with
#   `sparse_count` 2048 and `attention_mode` 2.
# - cann-recipes-infer (`models/deepseek_v3_2_exp`) does the same, or uses BSND for decoding.
# - sglang (`srt/hardware_backend/npu/attention/ascend_backend.py`) slices padding rows off before it calls the indexer,
#   so that the counts agree. Its pull request 32791 mends SB-01 and SB-02.

# %% [markdown] tags=["zh"] pair="85004e-74b777"
# ## 真实引擎怎么做
#
# - vllm-ascend（`vllm_ascend/attention/sfa_v1.py`）调用这两个算子的形式与本章相同，`sparse_count` 为 2048，`attention_mode` 为 2。
# - cann-recipes-infer（`models/deepseek_v3_2_exp`）做法相同，解码时也可以用 BSND。
# - sglang（`srt/hardware_backend/npu/attention/ascend_backend.py`）先切掉填充行，再调用索引器，让各处的个数一致。
#   它的 pull request 32791 修好了 SB-01 和 SB-02。

# %% [markdown] tags=["en"]
# ## Exercises
#
# **1.** Put request B first: its row becomes row 0, and its pages and key length come first. Someone writes the query
# lengths per request again, `[1, 3]`. Does a contract refuse? What shows the mistake?

# %% [markdown] tags=["zh"] pair="09fc94-df144f"
# ## 练习
#
# **1.** 让请求 B 排在前面：它的行成为第 0 行，页和键长度也排到前面。有人又把查询长度写成了逐请求的 `[1, 3]`。契约会拒绝吗？
# 靠什么发现这个错误？

# %% [markdown] tags=["en", "solution"]
# It passes: `[1, 3]` never decreases, and ends within the 4 rows. It says that A has 2 rows, and that row 3 belongs to
# nobody. There the reference kernel writes NaN, and that shows. The indexer, called with these lengths, leaves its row 3
# unwritten too. If SFA gets that row with right lengths, its contract refuses.

# %% [markdown] tags=["zh", "solution"] pair="2eb083-e24b2e"
# 不会拒绝：`[1, 3]` 没有变小，也没有超出 4 行。它的意思是 A 只有 2 行，第 3 行不归任何请求。
# 参考内核在那一行填上 NaN，错误就暴露了。索引器若用同样的长度，也不会写它的第 3 行；长度正确的 SFA 拿到这条索引行，契约就会拒绝。

# %% tags=["solution"]
turn = torch.tensor([3, 0, 1, 2], device=device)  # B's row, then A's
swapped = call | dict(block_table=table.flip(0),
                      actual_seq_lengths_kv=kv_lengths.flip(0))
for name in ("query", "query_rope", "sparse_indices"):
    swapped[name] = call[name][turn]
right = dict(actual_seq_lengths_query=int32([1, 4]))
plain = dict(actual_seq_lengths_query=int32([1, 3]))
assert equal(sfa(swapped | right), out[turn])
assert reference(SFA, swapped | plain)[3].isnan().all()

choosing = asking | dict(block_table=table.flip(0), sparse_count=4,
                         actual_seq_lengths_key=kv_lengths.flip(0))
for name in ("query", "weights"):
    choosing[name] = indexer[name][turn]
unwritten = reference(LI, choosing | plain).to(device)  # [T, 1, K]
found = refusal(lambda: sfa(swapped | right | dict(sparse_indices=unwritten)))
assert found.argument == "sparse_indices[3]" and found.case == "SB-02"

# %% [markdown] tags=["en"]
# **2.** Read on the sheet what changes where keys are packed instead of paged, `layout_kv="TND"`. Make that call for our
# batch, with the same index rows.

# %% [markdown] tags=["zh"] pair="2dd897-aa2d67"
# **2.** 键不分页而是打包时，即 `layout_kv="TND"`，什么会变？从契约页上找出来，然后为我们的 batch 写出这个调用，索引行不变。

# %% [markdown] tags=["en", "solution"]
# The keys have the axes (S, 1, R), all requests one after the other. Key lengths become ends. The block table has to
# go. The index rows stay: a place in the request is the same, wherever the request lies.

# %% [markdown] tags=["zh", "solution"] pair="9c7369-e9ec9e"
# 键的轴变成 (S, 1, R)，所有请求首尾相接；键长度变成终点；块表必须去掉。索引行不变：不管请求存在哪里，请求内的位置是同一个。

# %% tags=["solution"]
def packed(pool):
    of_a, of_b = (pool[ids.long()].flatten(0, 1) for ids in table)  # [slots, 1, width]
    return torch.cat([of_a[:7], of_b[:3]])  # [S, 1, width]


key = packed(call["key"])  # [S, 1, R]
changes = dict(layout_kv="TND", key=key, value=key, key_rope=packed(call["key_rope"]),
               actual_seq_lengths_kv=int32([7, 10]))
assert refusal(lambda: attend(**changes)).argument == "block_table"
assert equal(attend(**changes, block_table=None), out)

# %% [markdown] tags=["en"]
# **3.** Suppose a device zeroes the rows behind the last request, and an engine relies on it. With `assume(...)` from
# `trueup.core.ops.contract`, an open point takes its other side. What does this change in row 3 of the padded call?

# %% [markdown] tags=["zh"] pair="560fec-400555"
# **3.** 假设某个设备会把最后一个请求之后的行清零，而引擎依赖这一点。`trueup.core.ops.contract` 里有个 `assume(...)`，
# 它可以让一个未决点取另一侧。它会怎样改变刚才填充过的调用的第 3 行？

# %% [markdown] tags=["en", "solution"]
# There are zeros in place of NaN. `assume` proves nothing: it states what the code takes for granted, in the place where
# it does.

# %% [markdown] tags=["zh", "solution"] pair="8d7e2e-2e8a0a"
# 那一行变成零，不再是 NaN。`assume` 什么也没有证明：它只是在依赖这一点的地方，写明代码依赖的是什么。

# %% tags=["solution"]
with assume("rows-past-the-end"):
    assert not reference(SFA, unowned)[3].any()
assert reference(SFA, unowned)[3].isnan().all()

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Install `torch_npu` beside the packages and run all cells. The set-up then takes the real widths and bfloat16, and
# `audit` checks each call before a kernel of torch_npu gets it. `by_hand` then judges your device. Set
# `ASCEND_LAUNCH_BLOCKING=1` before you record a failing run, or the error comes out of a later call. No device has run
# this chapter yet; [what ran where](../what-ran-where.md) keeps the account.

# %% [markdown] tags=["zh"] pair="4d55c2-8b63f6"
# ## 在 NPU 机器上
#
# 除这些软件包外再装上 `torch_npu`，然后运行全部单元格。准备单元格会改用真实的宽度和 bfloat16，
# `audit` 在 torch_npu 的内核收到调用之前逐一检查。这时，`by_hand` 检验的就是你的设备。
# 记录一次失败的运行之前，请先设 `ASCEND_LAUNCH_BLOCKING=1`，否则错误会从后面的某次调用里冒出来。
# 本章还没有在任何设备上运行过，详见[哪些在哪里跑过](../what-ran-where.md)。
