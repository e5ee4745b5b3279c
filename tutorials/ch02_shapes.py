# ---
# title:
#   en: "2. Shapes, real and padded"
#   zh: "2. 形状：真实的与填充的"
# outcome:
#   en: you can read a Layout, and say why a batch that is planned first and padded later goes wrong
#   zh: 能读懂 Layout，并说清楚为什么“先规划、后填充”的 batch 会出错
# minutes: 18
# prerequisites:
#   en: "[chapter 1](ch01_run.md); what queries, keys and a causal mask are"
#   zh: "[第 1 章](ch01_run.md)；知道注意力里的查询、键和因果掩码"
# bugs: [SB-03, SB-04, SB-05, SB-09]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** Before every forward a serving engine *plans*: how many query rows and keys each request has, and
# where its cache rows lie. It also *pads*: graphs are recorded for a few sizes only, and devices that work together
# agree on one number of rows. If it plans first and pads later, the tensors of one operator call describe two
# different batches. trueup does both in one function, `plan`. Its result, a `Layout`, never changes, and every tensor
# and list of the forward is derived from it. So none can describe another batch.
#
# The four bugs below happened in public projects; SB-nn is a bug's number in the [bug gallery](../bugs.md). Each is
# made small enough to follow by hand.
#
# ## The smallest picture
#
# Requests A and B share a forward. A computes 3 new tokens, B computes 2. Their queries are the rows of one tensor
# `q` [T, N, D]: T token rows, N query heads, D numbers per head. This way of packing is called TND. The keys are in
# the cache: 6 for A and 9 for B, the new tokens included. Three lists describe this to the attention operator:
#
# - `q_cum`, here `[3, 5]`: the cumulative query lengths, that is, where each request's rows end;
# - `kv_lens`, here `[6, 9]`: how many keys each request has;
# - `block_table`, here `[[1], [2]]`: the cache pages that hold them, one line for each request
#   ([chapter 3](ch03_cache.md) is about pages).
#
# The graph was recorded for 8 rows, so three rows of zeros are appended. Whose are they?

# %% [markdown] tags=["zh"] pair="3bf16d-afe950"
# **要点。** 每次前向之前，推理引擎都要*规划*：每个请求有几行查询、多少个键，缓存行放在哪里。它还要*填充*（padding）：
# 计算图（graph）只按少数几种尺寸录制，协同工作的几个设备也要约定同一个行数。如果先规划、后填充，
# 同一次算子调用里的张量描述的就是两个不同的 batch。trueup 用一个函数 `plan` 同时做这两件事。它返回的 `Layout`（布局）
# 不可修改，这次前向的所有张量和列表都由它推导出来，所以其中任何一个都不可能描述别的 batch。
#
# 下面四个缺陷都来自公开项目，SB-nn 是它们在[缺陷图鉴](../bugs.md)里的编号；这里把它们缩小到可以手算。
#
# ## 最小的一张图
#
# 请求 A 和 B 共用一次前向。A 算 3 个新词元，B 算 2 个。它们的查询是同一个张量 `q` [T, N, D] 的行：T 是词元行数，
# N 是查询头数，D 是每个头的宽度。这种排法叫 TND。键在缓存里：A 有 6 个，B 有 9 个，都包括新词元。
# 注意力算子靠三个列表了解这些：
#
# - `q_cum`，这里是 `[3, 5]`：累计的查询长度，即每个请求的行到哪里为止；
# - `kv_lens`，这里是 `[6, 9]`：每个请求有多少个键；
# - `block_table`（块表），这里是 `[[1], [2]]`：键在缓存的哪些页上，每个请求一行（[第 3 章](ch03_cache.md)专门讲页）。
#
# 计算图是按 8 行录制的，所以后面填充了三行零。这三行归谁？

# %% tags=["fold"]
from trueup.core.picture import boxes

unowned = [("?", "bad")] * 3
boxes([("row of q", list("01234567")),
       ("planned, then padded", [*"AAABB", *unowned]),
       ("padded in the plan", [*"AAABB", *[("dummy", "pad")] * 3])],
      ("Planned, then padded: nobody owns the last rows. Padded in the plan: a dummy request does.",
       "先规划、再填充：最后三行不属于任何请求。在规划里填充：它们归一个哑请求。"))

# %% [markdown] tags=["en"]
# The next cells are set-up: sizes, a cache with random keys on pages 1 to 4, and `attend`, which makes the operator
# call. The cache is that of MLA: a key is a *latent* of R numbers, which serves as the value too, and a *rope* part of
# Dr numbers, which carries the position. All heads share both. A query has the same two parts, in two tensors: `q` [T,
# N, R], so D is R here, and `q_rope` [T, N, Dr]. [Chapter 5](ch05_mla.md) shows why; in this chapter they are random
# numbers. [Chapter 4](ch04_operators.md) goes through the operator's arguments.
#
# The widths are tiny, far below those that the operator accepts on a device. So the calls are made under
# `profile("paper")`, which checks only how the sizes relate to each other. On an NPU machine the cells take real widths
# instead, and `audit` checks every call before the kernel gets it.

# %% [markdown] tags=["zh"] pair="683d1a-56bec8"
# 接下来几个单元格是准备：尺寸、一个在第 1 到 4 页放了随机键的缓存，以及发出算子调用的 `attend`。缓存是 MLA 的缓存：
# 一个键由两部分组成，一是 R 个数的*潜变量*（latent），它同时也是值；二是 Dr 个数的 *rope* 部分，它带着位置信息。
# 所有头共用这两部分。查询也分成同样的两部分，放在两个张量里：
# `q` [T, N, R]（所以这里 D 就是 R）和 `q_rope` [T, N, Dr]。为什么这样，[第 5 章](ch05_mla.md)再讲；在本章里它们只是随机数。
# 算子的各个参数，[第 4 章](ch04_operators.md)逐个讲解。
#
# 这里的宽度很小，远小于算子在设备上接受的值，所以调用都放在 `profile("paper")` 之下，
# 它只检查各个尺寸之间的关系。在 NPU 机器上，
# 这些单元格改用真实宽度，并由 `audit` 在内核收到调用之前逐一检查。

# %%
import torch

from trueup.core import Rows, audit, ledger, load, materialise, plan
from trueup.core.cache import CacheSpec, Pools
from trueup.core.device import pick_device
from trueup.core.layers.rope import rope_cos_sin
from trueup.core.layout import Mode, Policy
from trueup.core.ops.contract import profile
from trueup.core.pages import PagePool
from trueup.core.planning import Work
from trueup.core.rows import Kind
from trueup.core.view import causal_mask

load()
device = pick_device()
N, P = 2, 16  # query heads; tokens on a cache page
R, Dr, dtype, rules = 8, 4, torch.float64, lambda: profile("paper")  # R: latent width, Dr: rope width
tolerance = 1e-9
if device.type == "npu":
    R, Dr, dtype, rules, tolerance = 512, 64, torch.bfloat16, audit, 2e-2

# %%
torch.manual_seed(0)


def random(*shape):
    return torch.randn(*shape).to(device, dtype)


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

# %%
pools = Pools(CacheSpec(1, R, Dr, dtype, device), PagePool(5, P))
latent, rope = pools.paged(0)  # [pages, P, R], [pages, P, Dr]: a key is a latent and a rope part
latent[1:], rope[1:] = random(4, P, R), random(4, P, Dr)
q, q_rope = random(8, N, R), random(8, N, Dr)  # [Tp, N, R], [Tp, N, Dr]
q[5:], q_rope[5:] = 0, 0  # five real rows, three of padding


def attend(q, q_rope, q_cum, kv_lens, table):
    """Causal attention of packed rows over paged keys: [T, N, R]."""
    table = torch.as_tensor(table, dtype=torch.int32, device=device)  # [B, columns]
    with rules():
        return torch.ops.npu.npu_fused_infer_attention_score_v2(
            q, latent, latent, query_rope=q_rope, key_rope=rope, input_layout="TND", softmax_scale=0.3,
            actual_seq_qlen=q_cum, actual_seq_kvlen=kv_lens, block_table=table, block_size=P,
            sparse_mode=3, atten_mask=causal_mask(device), num_query_heads=N, num_key_value_heads=1)[0]

# %% [markdown] tags=["en"]
# Without padding everything agrees. These five rows are what every later call must reproduce.

# %% [markdown] tags=["zh"] pair="b14d57-e8fd64"
# 没有填充时，一切都对得上。后面每次调用，前五行都必须与这里的结果相同。

# %%
real = attend(q[:5], q_rope[:5], [3, 5], [6, 9], [[1], [2]])  # [T, N, R]
assert real.shape == (5, N, R) and real.isfinite().all()

# %% [markdown] tags=["en"]
# ## The wrong way: plan, then pad
#
# Now `q` has 8 rows and the lists still describe 5. This is [SB-03](../bugs.md#sb-03). In vllm-ascend PR #6596 the
# counts were 72 rows and a last entry of 65.

# %% [markdown] tags=["zh"] pair="b671d8-e95616"
# ## 错误的做法：先规划，后填充
#
# 现在 `q` 有 8 行，列表描述的还是 5 行。这就是 [SB-03](../bugs.md#sb-03)。在 vllm-ascend PR #6596 里，张量有 72 行，
# 列表的最后一项是 65。

# %% tags=["raises-exception"] raises="ContractError" says="queryT(8) must equal the last element"
attend(q, q_rope, [3, 5], [6, 9], [[1], [2]])

# %% [markdown] tags=["en"]
# The last entry of `q_cum` must equal the number of rows. A tempting repair makes it so: write 8 where 5 was. The
# operator is content with `[3, 8]`. So we compare the five real rows with the result from above:

# %% [markdown] tags=["zh"] pair="0c92c1-256726"
# `q_cum` 的最后一项必须等于行数。有个很诱人的修法：把 5 改成 8。算子接受 `[3, 8]`。
# 那就拿五个真实行与上面的结果比一比：

# %% tags=["raises-exception"] raises="AssertionError" says="Mismatched elements"
raised = attend(q, q_rope, [3, 8], [6, 9], [[1], [2]])  # [Tp, N, R]
equal(raised[:5], real)

# %% [markdown] tags=["en"]
# Why? B now has 5 query rows, not 2. The causal mask is aligned at the end: the last row sees all keys, the row
# before it one key fewer, and so on. So row i of a request sees its first `kv_len - q_len + i + 1` keys. With three
# more rows after them, B's real rows lose sight of three keys each. A is untouched, and nothing raises an error.

# %% [markdown] tags=["zh"] pair="e6cb79-27e555"
# 为什么？B 现在有 5 行查询，而不是 2 行。因果掩码按末尾对齐：最后一行看得到全部键，往前每退一行少看一个。
# 所以一个请求的第 i 行看得到前 `kv_len - q_len + i + 1` 个键。后面多出三行，B 的两个真实行就各少看三个键。A 不受影响，
# 也没有任何报错。

# %%
def visible(q_len, kv_len):
    return [kv_len - q_len + i + 1 for i in range(q_len)]


assert visible(2, 9) == [8, 9]  # what B's two rows must see
assert visible(5, 9)[:2] == [5, 6]  # what they saw
equal(raised[:3], real[:3])  # A's rows are right

# %% [markdown] tags=["en"]
# ## The right way: padded rows are a request
#
# The three rows get a request of their own: a third entry in `q_cum`, a third key length (3: its rows see only each
# other), and a third line in the block table. That line names page 0, the *dummy page*, which belongs to nobody.

# %% [markdown] tags=["zh"] pair="6ebee4-e70237"
# ## 正确的做法：填充行也是一个请求
#
# 让这三行自成一个请求，即*哑请求*（dummy request）：`q_cum` 多一项，键长度多一项（值为 3：这三行只看得到彼此），
# 块表也多一行。块表的这一行指向第 0 页，也就是不属于任何人的*哑页*。

# %%
covered = attend(q, q_rope, [3, 5, 8], [6, 9, 3], [[1], [2], [0]])  # [Tp, N, R]
equal(covered[:5], real)
assert covered.isfinite().all()  # the padded rows have a defined result, too

# %% [markdown] tags=["en"]
# Nobody should write these lists by hand. `plan` takes the requests as `Work`: id, mode, tokens already cached, new
# tokens, pages. It also takes the number of rows that was agreed, and it is the only code in trueup that pads rows.
# (VERIFY is the mode that checks drafted tokens; for this chapter it means: several rows a request.)

# %% [markdown] tags=["zh"] pair="f068da-7f84b9"
# 这些列表不该手写。`plan` 的输入是 `Work`：请求号、模式、已缓存的词元数、新词元数、页；还有约定好的行数。
# 整个 trueup 里，只有它填充行。（VERIFY 是验证草稿词元的模式；在本章里，只要知道它让每个请求有好几行就够了。）

# %%
work = [Work(0, Mode.VERIFY, 3, 3, (1,)), Work(1, Mode.VERIFY, 7, 2, (2,))]
layout = plan(work, page_size=P, rows=8)
(segment,) = layout.segments

assert (layout.real_requests, layout.padded_requests) == (2, 3)  # B, Bp
assert (layout.real_tokens, layout.padded_tokens) == (5, 8)  # T, Tp
assert segment.q_cum == (3, 5, 8) and segment.kv_lens == (6, 9, 3)
assert segment.pages == ((1,), (2,), (0,))
assert layout.token_rows == {0: range(0, 3), 1: range(3, 5)}  # real requests only
assert segment.slots == (19, 20, 21, 39, 40, 0, 1, 2)  # where each row is written: page * 16 + offset

# %% [markdown] tags=["en"]
# A [`Layout`][trueup.core.Layout] holds integers. [`materialise`][trueup.core.materialise] makes tensors of them, and
# nothing else does. FIA (fused infer attention, the operator in `attend`) wants lengths as host lists; another
# operator, sparse attention, wants them on the device. Both are made from the same tuple, so they cannot differ. The
# *shape ledger* shows what the operator got: each tensor with its axis letters, and how much of it is real. `T 5 of 8`
# means 8 rows, of which 5 are real. `lse` is a second output, which this call does not ask for.

# %% [markdown] tags=["zh"] pair="ba2fac-d17581"
# [`Layout`][trueup.core.Layout] 里只有整数。把它们变成张量的，只有 [`materialise`][trueup.core.materialise]。
# FIA（fused infer attention，即 `attend` 里的算子）要主机上的长度列表；另一个算子，稀疏注意力，要设备上的长度张量。
# 两份都由同一个元组生成，不可能不一致。*形状账本*（ledger）显示算子收到了什么：每个张量的轴字母，
# 以及其中有多少是真实的。`T 5 of 8` 表示 8 行里有 5 行是真实的；`lse` 是第二个输出，这次调用没有要它。

# %%
seg = materialise(layout, pools).segments[0]
assert seg.q_cum_device.tolist() == seg.q_cum == [3, 5, 8]
assert seg.kv_lens_device.tolist() == seg.kv_lens == [6, 9, 3]
with ledger.record(layout=layout) as led:
    out = attend(q, q_rope, seg.q_cum, seg.kv_lens, seg.block_table)  # [Tp, N, R]
equal(out[:5], real)
led

# %% [markdown] tags=["en"]
# ## One entry short, but only under full load
#
# [SB-04](../bugs.md#sb-04), vllm-ascend PR #10769: an engine takes at most 4 requests, and all 4 are busy. Padding
# the tokens to 8 rows adds a dummy request, the fifth. The buffer of `q_cum` has room for it. The buffers of key
# lengths and block table have 4 entries, and a slice past the end is no error in Python: it returns fewer entries.

# %% [markdown] tags=["zh"] pair="af563d-caf5ff"
# ## 只在满载时少一项
#
# [SB-04](../bugs.md#sb-04)，vllm-ascend PR #10769：引擎最多接 4 个请求，现在 4 个都在跑。词元填充到 8 行，
# 多出第五个请求，一个哑请求。`q_cum` 的缓冲区留了它的位置；键长度和块表的缓冲区只有 4 项。而在 Python 里，
# 切片越过末尾并不报错，只是少返回几项。

# %% tags=["raises-exception"] raises="ContractError" says="5 rows, one for each request"
kv_buffer, table_buffer = [7, 3, 5, 2], [[1], [2], [3], [4]]  # max_requests = 4
q_cum, Bp = [1, 2, 3, 4, 8], 5  # the fifth request owns rows 4 to 7
attend(q, q_rope, q_cum, kv_buffer[:Bp], table_buffer[:Bp])

# %% [markdown] tags=["en"]
# With three of four requests busy the slices are long enough, so only a full load shows the fault (exercise 2). A
# layout has no buffers of different capacity. All its columns are made together, and its constructor compares their
# lengths. Its dummies are as wide as the real requests, so there are four of one row here, not one of four.

# %% [markdown] tags=["zh"] pair="ffa039-1f832c"
# 最多接 4 个请求、只有 3 个在跑时，切片够长，所以只有满载才暴露（练习 2）。布局里没有容量不一的缓冲区：所有列一起生成，
# 构造函数还会核对它们的长度。哑请求与真实请求一样宽，所以这里是四个各一行的哑请求，而不是一个四行的。

# %%
busy = [Work(r, Mode.DECODE, kv - 1, 1, (r + 1,)) for r, kv in enumerate([7, 3, 5, 2])]
seg = materialise(plan(busy, page_size=P, buckets=(4,), rows=8), pools).segments[0]
assert len(seg.q_cum) == len(seg.kv_lens) == len(seg.block_table) == 8  # four real requests, four dummies

alone = attend(q[:4], q_rope[:4], [1, 2, 3, 4], [7, 3, 5, 2], [[1], [2], [3], [4]])  # [B, N, R]
out = attend(q, q_rope, seg.q_cum, seg.kv_lens, seg.block_table)  # [Bp, N, R]
equal(out[:4], alone)

# %% [markdown] tags=["en"]
# ## Two policies: COVER and TRIM
#
# Two devices (*ranks*) serve requests of their own but share a model's experts, and to reach these they exchange
# equal numbers of rows. One has 3 decoding requests, the other 4, so the first pads its tensor to 4 rows. In
# [SB-05](../bugs.md#sb-05) (vllm-ascend issue #16799) the rest of its plan stayed at 3 rows, and the fused cache
# write got both counts. `write` makes that call: it normalises the latent, rotates the rope part by the token's
# position, and stores both at the token's slot.

# %% [markdown] tags=["zh"] pair="bb04bf-ffa59a"
# ## 两种策略：COVER 与 TRIM
#
# 两个设备（*rank*）各自服务自己的请求，但共用一个模型的专家；为此它们要交换数据，行数必须相等。一个有 3 个请求在解码，
# 另一个有 4 个。于是第一个 rank 把张量填充到 4 行。在 [SB-05](../bugs.md#sb-05)（vllm-ascend issue #16799）里，
# 它的规划仍停在 3 行，融合的缓存写算子两种行数都收到了。下面的 `write` 就发出这个调用：对潜变量做归一化，
# 按词元位置旋转 rope 部分，再把两者写进词元的槽位。

# %%
kv, gamma = random(8, R + Dr), torch.ones(R, device=device, dtype=dtype)  # [T, R+Dr], [R]


def write(kv, positions, slots):
    cos, sin = rope_cos_sin(torch.tensor(positions, device=device), Dr, 10_000.0, dtype)  # [T, 1, 1, Dr] twice
    with rules():
        torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            kv[:, None, None], gamma, cos, sin, torch.tensor(slots, device=device),
            pools.rope[0], pools.latent[0], cache_mode="PA")


def written(action):
    """The slots whose latent row an action changes."""
    before = latent.clone()  # [pages, P, R]
    action()
    return (latent != before).any(-1).flatten().nonzero().flatten().tolist()

# %% tags=["raises-exception"] raises="ContractError" says="cos is 3 rows"
write(kv[:4], positions=[6, 2, 4], slots=[22, 34, 52])  # 4 rows, but 3 positions and 3 slots

# %% [markdown] tags=["en"]
# There are two sound answers, and every segment of a layout names the one it uses:
#
# - **COVER**: dummy requests own the padded rows, and every operator sees every row.
# - **TRIM**: attention and the cache write get the real rows only, and zero rows are appended to the result.
#
# `plan` covers decoding, where a dummy row is cheap. It trims prompts, where attention over thousands of padded rows
# would cost real time.

# %% [markdown] tags=["zh"] pair="62d7ca-b6dd9b"
# 正确的做法有两种，布局的每一段（segment）都写明自己用哪一种：
#
# - **COVER**：填充行归哑请求所有，每个算子都看到每一行。
# - **TRIM**：注意力和缓存写只拿真实行，算完再在后面补上零行。
#
# `plan` 对解码用 COVER，因为多一行哑请求很便宜；对提示词用 TRIM，因为对几千行填充做注意力，代价不小。

# %%
three = [Work(r, Mode.DECODE, start, 1, (r + 1,)) for r, start in enumerate([6, 2, 4])]
cover = plan(three, page_size=P, rows=4)
assert cover.segments[0].policy is Policy.COVER
assert written(lambda: write(kv[:4], cover.positions, cover.slots)) == [0, 22, 34, 52]  # 0: dummy page

trim = plan([Work(9, Mode.PREFILL, 0, 3, (4,))], page_size=P, rows=4)
seg = materialise(trim, pools).segments[0]
assert seg.segment.policy is Policy.TRIM and seg.rows == slice(0, 3)
positions, slots = trim.positions[seg.rows], trim.slots[seg.rows]  # [T]
assert written(lambda: write(kv[seg.rows], positions, slots)) == [64, 65, 66]
out = torch.zeros(trim.padded_tokens, N, R, device=device, dtype=dtype)  # [Tp, N, R]
out[seg.rows] = attend(q[seg.rows], q_rope[seg.rows], seg.q_cum, seg.kv_lens, seg.block_table)
assert out[:3].any() and not out[3].any()  # 4 rows again for the exchange, the last one zero

# %% [markdown] tags=["en"]
# ## -1 is an address
#
# Where may a padded row be written? Many engines give it slot -1, meaning "nowhere". That holds as long as every
# writer filters it. In [SB-09](../bugs.md#sb-09) (vllm issue #43810) one writer first divided, to get page and
# offset. A pool of 5 pages of 16 has slots 0 to 79; 79 is in use and holds a 7.

# %% [markdown] tags=["zh"] pair="2b4ed1-cded9a"
# ## -1 也是一个地址
#
# 填充行该写到哪里？很多引擎给它槽位 -1，意思是“哪儿也不写”。前提是每处写缓存的代码都先把它过滤掉。
# 在 [SB-09](../bugs.md#sb-09)（vllm issue #43810）里，有一处写缓存的代码没有过滤，先做除法，求出页和页内偏移。5 页、
# 每页 16 个槽位的池子，槽位是 0 到 79；79 号正在使用，存着 7。

# %% tags=["raises-exception"] raises="AssertionError" says="slot 79 was overwritten"
cache = torch.zeros(5, P)  # [pages, P]
cache[4, 15] = 7
slots = torch.tensor([20, 37, 54] + [-1] * 5)  # [Tp]: three real rows, five of padding
cache[slots // P, slots % P] = torch.ones(8)  # -1 becomes page -1, offset 15
assert cache[4, 15] == 7, "slot 79 was overwritten"

# %% [markdown] tags=["en"]
# By its documents, the fused write of this chapter skips negative slots. Those of another one,
# `npu_scatter_pa_kv_cache`, name only slots from 0 up, so its contract refuses -1. In trueup the question does not come
# up: a dummy request lives on page 0, so its slots are ordinary ones.

# %% [markdown] tags=["zh"] pair="222ecc-2196eb"
# 按文档，本章的融合写算子会跳过负槽位。另一个算子 `npu_scatter_pa_kv_cache` 的文档只允许不小于 0 的槽位，所以它的契约拒绝 -1。
# 在 trueup 里没有这个问题：哑请求用的是第 0 页，它的槽位就是普通槽位。

# %%
layout = plan([Work(r, Mode.DECODE, r + 4, 1, (r + 1,)) for r in range(3)], page_size=P, buckets=(8,))
assert layout.slots == (20, 37, 54, 0, 0, 0, 0, 0)
assert written(lambda: write(kv, layout.positions, layout.slots)) == [0, 20, 37, 54]  # and 79 is as it was

# %% [markdown] tags=["en"]
# ## Every list, in every mode
#
# A list that is set in some modes only will one day be read in another. So a layout has all of them in each mode.
# Here are three requests (none in IDLE), padded to a bucket of four where the policy is COVER. EXTEND is a piece of a
# prompt that follows cached tokens. The speculative modes DRAFT and DRAFT_EXTEND have the lists of DECODE and VERIFY. A
# rank in IDLE has no request, yet it takes part in the exchange of rows, so it has lists, too.

# %% [markdown] tags=["zh"] pair="fd4d65-e61a45"
# ## 每种模式都有每个列表
#
# 只在某些模式下才赋值的列表，总有一天会在别的模式下被读到。所以布局在每种模式下都有全部列表。
# 下面是三个请求（IDLE 没有请求），用 COVER 的模式填充到大小为 4 的桶。EXTEND 是接在已缓存词元后面的一段提示词。
# 投机解码的 DRAFT 和 DRAFT_EXTEND，列表与 DECODE、VERIFY 相同。IDLE 的 rank 没有请求，但要参加行的交换，所以也有列表。

# %%
modes = {  # (cached, new tokens) of each request      policy   q_cum             kv_lens
    Mode.DECODE:  ([(13, 1), (5, 1), (26, 1)],         "cover", [1, 2, 3, 4],     [14, 6, 27, 1]),
    Mode.VERIFY:  ([(13, 4), (5, 4), (26, 4)],         "cover", [4, 8, 12, 16],   [17, 9, 30, 4]),
    Mode.PREFILL: ([(0, 13), (0, 5), (0, 26)],         "trim",  [13, 18, 44],     [13, 5, 26]),
    Mode.EXTEND:  ([(16, 3), (16, 5), (32, 2)],        "trim",  [3, 8, 10],       [19, 21, 34]),
    Mode.IDLE:    ([],                                 "cover", [1, 2, 3, 4],     [1, 1, 1, 1]),
}
for mode, (requests, *expected) in modes.items():
    work = [Work(r, mode, cached, new, (3 * r + 1, 3 * r + 2, 3 * r + 3)) for r, (cached, new) in enumerate(requests)]
    seg = materialise(plan(work, page_size=P, buckets=(4,)), pools).segments[0]
    assert [seg.segment.policy.value, seg.q_cum, seg.kv_lens] == expected

# %% [markdown] tags=["en"]
# Requests of one mode form a *segment*, and a batch may have several: here two requests decode (padded to four)
# beside a prompt of five tokens. `token_rows` says where each request's rows are in the whole tensor.

# %% [markdown] tags=["zh"] pair="641542-9bda28"
# 同一模式的请求组成一段（*segment*），一个 batch 可以有好几段：这里两个请求在解码（填充到四个），
# 旁边还有一个五个词元的提示词。`token_rows` 给出每个请求的行在整个张量里的位置。

# %%
work = [Work(7, Mode.PREFILL, 0, 5, (1,)), Work(8, Mode.DECODE, 8, 1, (2,)), Work(9, Mode.DECODE, 3, 1, (3,))]
mixed = plan(work, page_size=P, buckets=(4,))
decode, prefill = mixed.segments
assert (decode.mode, decode.real_tokens, decode.padded_tokens) == (Mode.DECODE, 2, 4)
assert (prefill.mode, prefill.real_tokens, prefill.padded_tokens) == (Mode.PREFILL, 5, 5)
assert mixed.token_rows == {8: range(0, 1), 9: range(1, 2), 7: range(4, 9)}

# %% [markdown] tags=["en"]
# ## What outlives a forward
#
# The result of a forward is used when the next batch, with other rows, is already being made. So it is kept as
# [`Rows`][trueup.core.Rows]: a tensor together with its layout, and a `Kind`: TOKEN for one row a token, REQUEST for
# one row a request. `by_request()` takes the padding off and keys the rest by request, so order and count of the next
# batch do not matter.

# %% [markdown] tags=["zh"] pair="78a827-9fd543"
# ## 前向之后还要用的东西
#
# 用到前向结果的时候，下一个 batch 可能已经在准备了，而它的行不一样。所以结果存成 [`Rows`][trueup.core.Rows]：
# 张量连同它的布局，再加一个 `Kind`，TOKEN 表示每个词元一行，REQUEST 表示每个请求一行。
# `by_request()` 去掉填充，按请求号取用，下一个 batch 的顺序和数量就都无关紧要了。

# %%
hidden = Rows(Kind.TOKEN, mixed, torch.arange(9.0)[:, None])  # [Tp, H], H = 1: each row holds its own number
last = hidden.last()  # [B, H], one row a request: that of its last token
assert {request: row.item() for request, row in last.by_request().items()} == {8: 0, 9: 1, 7: 8}

# %% tags=["raises-exception"] raises="ValueError" says="9 token rows for a layout with 8"
Rows(Kind.TOKEN, layout, hidden.tensor)  # rows of one batch under the layout of another

# %% [markdown] tags=["en"]
# ## What real engines do
#
# - **sglang** pads the batch for equal ranks, and its block tables and length lists are not among the fields that are
#   padded. Several attention paths repair that on their own: some cut the queries to the planned rows, some append rows
#   (`sglang: srt/hardware_backend/npu/attention/ascend_backend.py`).
# - **vllm-ascend** settles mode and padding in one function, then adds dummy requests, or one that swallows all rows
#   left (`vllm-ascend: vllm_ascend/worker/model_runner_v1.py`, `_pad_query_start_loc_for_fia`). Its dense MLA trims;
#   its sparse attention runs on all padded rows.
#
# ## Exercises
#
# **1.** Two requests verify 2 tokens each, and 7 rows were agreed. What is `q_cum`?

# %% [markdown] tags=["zh"] pair="0a95f2-71cfe9"
# ## 真实引擎怎么做
#
# - **sglang** 为了让各 rank 行数相等而填充 batch，但块表和长度列表不在被填充的字段之列。几条注意力路径各自补救：
#   有的把查询截到规划的行数，有的补行（`sglang: srt/hardware_backend/npu/attention/ascend_backend.py`）。
# - **vllm-ascend** 在一个函数里定下模式和填充，然后补上若干哑请求，
#   或者补一个吞下所有剩余行的请求（`vllm-ascend: vllm_ascend/worker/model_runner_v1.py`，
#   `_pad_query_start_loc_for_fia`）。它的稠密 MLA 只算真实行；稀疏注意力则在全部填充后的行上计算。
#
# ## 练习
#
# **1.** 两个请求各验证 2 个词元，约定的行数是 7。`q_cum` 是什么？

# %% tags=["solution"]
layout = plan([Work(0, Mode.VERIFY, 5, 2, (1,)), Work(1, Mode.VERIFY, 8, 2, (2,))], page_size=P, rows=7)
assert layout.segments[0].q_cum == (2, 4, 6, 7)  # a dummy of the usual width, and one for the last row

# %% [markdown] tags=["en"]
# **2.** Show that the sliced buffers of SB-04 are long enough with three of four requests busy.

# %% [markdown] tags=["zh"] pair="74be55-1c6e85"
# **2.** 用代码说明：最多接 4 个请求、只有 3 个在跑时，SB-04 里从缓冲区切出来的两个列表是够长的。

# %% tags=["solution"]
kv_buffer, table_buffer = [7, 3, 5, 5], [[1], [2], [3], [0]]  # the dummy request takes the fourth place
out = attend(q, q_rope, [1, 2, 3, 8], kv_buffer[:4], table_buffer[:4])  # [Tp, N, R]
equal(out[:3], attend(q[:3], q_rope[:3], [1, 2, 3], [7, 3, 5], [[1], [2], [3]]))

# %% [markdown] tags=["en"]
# **3.** Write `same_batch(rows, q_cum, kv_lens, table)`, which refuses the failing calls of SB-03 and SB-04 by
# counting. Which wrong call of this chapter can no such function see?

# %% [markdown] tags=["zh"] pair="60099c-4ba65b"
# **3.** 写一个 `same_batch(rows, q_cum, kv_lens, table)`，只靠数数就拒绝 SB-03 和 SB-04 中失败的调用。
# 本章有一个错误的调用，任何这样的函数都看不出来，是哪一个？

# %% tags=["solution"]
def same_batch(rows, q_cum, kv_lens, table):
    return q_cum[-1] == rows and len(q_cum) == len(kv_lens) == len(table)


assert same_batch(8, [3, 5, 8], [6, 9, 3], [[1], [2], [0]])
assert not same_batch(8, [3, 5], [6, 9], [[1], [2]])  # SB-03
assert not same_batch(8, [1, 2, 3, 4, 8], [7, 3, 5, 2], [[1], [2], [3], [4]])  # SB-04
assert same_batch(8, [3, 8], [6, 9], [[1], [2]])  # the raised entry: every count agrees, the meaning does not

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Install `torch_npu` beside the packages and run all cells. The set-up cell then takes the widths 512 and 64 and
# bfloat16. There the kernels are torch_npu's, which check little; `audit` applies the contracts, so the wrong calls
# stop with the same messages before any kernel reads foreign memory. No device has run this chapter yet;
# [what ran where](../what-ran-where.md) keeps the account.

# %% [markdown] tags=["zh"] pair="3bd316-fb2607"
# ## 在 NPU 机器上
#
# 除这些软件包外再装上 `torch_npu`，然后运行全部单元格。准备单元格会改用 512 和 64 的宽度，以及 bfloat16。
# 那里跑的是 torch_npu 的内核，它们检查得很少；`audit` 会套用契约，错误的调用在内核读到别人的内存之前就停下，
# 报出同样的消息。本章还没有在任何设备上运行过，详见[哪些在哪里跑过](../what-ran-where.md)。
