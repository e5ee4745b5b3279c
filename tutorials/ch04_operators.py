# ---
# title:
#   en: "4. Operators with contracts, on any machine"
#   zh: "4. 带契约的算子：任何机器都能调用"
# outcome:
#   en: you can make an Ascend operator call on a laptop, read its refusal part by part, and check a call of your own
#   zh: 能在笔记本电脑上调用昇腾算子，逐项读懂它报出的拒绝信息，并检查自己写的调用
# minutes: 18
# prerequisites:
#   en: "[chapter 2](ch02_shapes.md) for packed rows and lengths, [chapter 3](ch03_cache.md) for pages"
#   zh: "[第 2 章](ch02_shapes.md)的打包行与长度，[第 3 章](ch03_cache.md)的页"
# bugs: [SB-03, SB-06]
# hardware:
#   en: any laptop; the same cells run on an NPU machine
#   zh: 任何笔记本电脑；同样的单元格也能在 NPU 机器上运行
# ---

# %% [markdown] tags=["en"]
# **The claim.** A fused operator takes a dozen arguments that describe one batch. If two of them describe different
# batches, shape inference has no objection, and the device may have none either. A *contract* is the list of what must
# agree, checked before anything is computed. trueup puts contracts behind the name that NPU code calls anyway,
# `torch.ops.npu.X`, on any machine.
#
# ## One entry, three paths
#
# The name is an entry in PyTorch's dispatcher: a *schema* (the arguments, their types and defaults) and whatever kernel
# is registered for it. [`load()`][trueup.core.load] looks at what is installed, once per process, and says who will
# answer. Import `trueup.core` before `torch`: torch loads an installed torch_npu by itself,
# and without a driver that fails.

# %% [markdown] tags=["zh"] pair="21ad7f-2d820a"
# **要点。** 一个融合算子有十几个参数，它们描述的是同一个 batch。如果其中两个说的其实是两个不同的 batch，形状推导不会报错，
# 设备也未必报错。*契约*就是一张清单，写明哪些东西必须一致，在计算之前先检查。NPU 代码本来就调用 `torch.ops.npu.X`，
# trueup 把契约放在这个名字后面，在任何机器上都能用。
#
# ## 一个入口，三条路径
#
# 这个名字是 PyTorch 分发器里的一个入口：一份 *schema*（有哪些参数，什么类型，什么默认值），加上为它注册的内核（kernel）。
# [`load()`][trueup.core.load] 查看装了什么（每个进程只看一次），并告诉你调用由谁执行。
# 请先导入 `trueup.core`，再导入 `torch`：torch 会自动加载已安装的 torch_npu，没有驱动时就会失败。

# %%
from trueup.core import ContractError, audit, ledger, load
from trueup.core.device import pick_device
from trueup.core.ops.contract import profile
from trueup.core.ops.registry import OPERATORS, packet

path = load()
print(f"{path.name}: {path.reason}")

import torch

npu = torch.ops.npu
assert path.name in ("own", "hostnpu", "device") and load() == path
assert all(map(packet, OPERATORS))  # OPERATORS: those with a contract, by name; packet finds the entry

# %% tags=["fold"]
from IPython.display import HTML, display

PATHS = {"own": ("no torch_npu", "schema: trueup", "contract, then", "reference kernel"),
         "hostnpu": ("torch_npu, no NPU", "schema: torch_npu", "contract, then", "reference kernel"),
         "device": ("torch_npu and an NPU", "schema: torch_npu", "the device's kernel;", "contract in audit()")}
CLAIM = ('<span lang="en">One name, three paths. The thick box is the path that this process takes.</span>'
         '<span lang="zh">一个名字，三条路径。粗框是本进程走的那一条。</span>')
drawing = ['<rect x="165" y="2" width="230" height="44" rx="4" fill="none" stroke="currentColor"/>',
           '<text x="280" y="20">torch.ops.npu.X(...)</text><text x="280" y="38">dispatcher entry npu::X</text>']
for i, (name, lines) in enumerate(PATHS.items()):
    x, pen = 2 + 188 * i, f'stroke="currentColor" stroke-width="{4 if name == path.name else 1}"'
    drawing.append(f'<path d="M280 46 L{x + 90} 82" {pen}/>'
                   f'<rect x="{x}" y="82" width="180" height="118" rx="4" fill="none" {pen}/>')
    drawing += [f'<text x="{x + 90}" y="{106 + 21 * j}">{line}</text>' for j, line in enumerate((name, *lines))]
HTML('<figure class="trueup-picture"><svg viewBox="0 0 562 204" width="562" style="max-width:100%;height:auto" '
     'role="img" fill="currentColor" text-anchor="middle" font-family="monospace" font-size="13">'
     f'<title>torch.ops.npu.X: three paths</title>{"".join(drawing)}</svg><figcaption>{CLAIM}</figcaption></figure>')

# %% [markdown] tags=["en"]
# - `own`: torch_npu is absent. trueup defines the operators itself, with torch_npu 2.13.0's schemas.
# - `hostnpu`: the real torch_npu, but no usable NPU. Where the driver is missing, small stand-in libraries take its
#   place, so that torch_npu can be imported. The schemas are torch_npu's; for CPU tensors our kernels answer.
# - `device`: torch_npu's own kernels answer. A contract is checked there only inside `with audit():`.

# %% [markdown] tags=["zh"] pair="f85818-f77a52"
# - `own`：没有 torch_npu。trueup 自己定义算子，schema 取自 torch_npu 2.13.0。
# - `hostnpu`：有真正的 torch_npu，但没有可用的 NPU。缺少驱动时，用几个很小的桩库（stub）代替驱动库，让 torch_npu 能被导入。
#   schema 是 torch_npu 的；CPU 张量由 trueup 的参考内核计算。
# - `device`：由 torch_npu 自己的内核执行。只有在 `with audit():` 之内才检查契约。

# %% [markdown] tags=["en"]
# ## One good call
#
# Fused infer attention, version 2 (*FIA*), is the operator that trueup uses for attention. Here it reads a paged cache
# of latents, as decoding does ([chapter 5](ch05_mla.md) derives this form). Two requests: one has 1 query row and 20
# cached tokens, the other 3 rows and 22 tokens, the new ones included.

# %% [markdown] tags=["zh"] pair="70f8dd-48153b"
# ## 一次正确的调用
#
# 第 2 版融合推理注意力（fused infer attention，下称 *FIA*）是 trueup 做注意力用的算子。这里它读分页的潜变量缓存，解码时就是这样。
# 潜变量是 MLA 为每个词元缓存的短向量，代替键和值；[第 5 章](ch05_mla.md)推导这种形式。两个请求：一个有 1 个查询行，键共 20 个词元；
# 另一个有 3 个查询行，键共 22 个词元；键的个数都含这一步的新词元。

# %%
device = pick_device()
R, Dr, dtype, atol = 8, 4, torch.float32, 1e-5  # sizes that fit on a page
if device.type == "npu":
    R, Dr, dtype, atol = 512, 64, torch.bfloat16, 5e-2


def rules():  # see "Levels and profiles"
    return audit() if device.type == "npu" else profile("paper")


def random(*shape):
    return torch.randn(*shape).to(device, dtype)


torch.manual_seed(0)
query, query_rope = random(4, 2, R), random(4, 2, Dr)  # [T, N, R], [T, N, Dr]
latent, rope = random(5, 16, R), random(5, 16, Dr)  # [pages, P, R], [pages, P, Dr]
block_table = torch.tensor([[1, 2], [3, 4]]).to(device, torch.int32)  # [B, columns]
mask = torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)

# %%
call = dict(
    query=query, query_rope=query_rope, key=latent, value=latent, key_rope=rope,
    actual_seq_qlen=[1, 4], actual_seq_kvlen=[20, 22], block_table=block_table,
    block_size=16, atten_mask=mask, sparse_mode=3, softmax_scale=0.25,
    num_query_heads=2, num_key_value_heads=1, input_layout="TND",
)
fia = npu.npu_fused_infer_attention_score_v2


def attend(**changes):
    with rules():
        return fia(**(call | changes))[0]  # [T, N, R]


assert attend().shape == (4, 2, R)

# %% [markdown] tags=["en"]
# The *ledger* records a call and names the axes of every tensor. `T` counts the rows of both requests, `N` the heads,
# `P` the tokens of a page. `R` is the width of a latent, and in this form the width of a query too. One pool of latents
# serves as key and as value.

# %% [markdown] tags=["zh"] pair="a785ee-848ea7"
# *账本*（ledger）记录一次调用，并给每个张量的轴标上名字。`T` 是两个请求的查询行总数，`N` 是头数，`P` 是一页的词元数。
# `R` 是潜变量的宽度，在这种形式里也是查询的宽度。同一个潜变量池既当键又当值。

# %%
with ledger.record() as led:
    attend()

[recorded] = led.calls
axes = {o.name: [axis.name for axis in o.axes] for o in recorded.operands}
assert axes["query"] == ["T", "N", "R"] and axes["key"] == ["pages", "P", "R"]
assert axes["actual_seq_qlen"] == axes["actual_seq_kvlen"] == ["B"]
display(led)

# %% [markdown] tags=["en"]
# What FIA expects of them, in short; all its rules are on its
# [contract sheet](../operators/npu_fused_infer_attention_score_v2.md):
#
# | argument | rule |
# |---|---|
# | `query` | layout TND: the rows of all requests, one after the other; no batch axis |
# | `query_rope`, `key_rope` | the rope (rotary) parts: both or neither, with the rows of query and key |
# | `actual_seq_qlen` | **cumulative**: where each request ends in `query`; the last is T |
# | `actual_seq_kvlen` | **per request**, because the keys are paged |
# | `block_table` | int32, one row a request: its pages in order |
# | `atten_mask` | 1 means **hidden**; with `sparse_mode` 3 always the same 2048 x 2048 constant, 1 above the diagonal |
# | `sparse_mode` | 3: causal, and a request's last row sees all its keys |
# | `num_query_heads` | N; a power of two, at most 128, where R is 512 as in real models |
# | `softmax_scale` | never derived from a width; the default is 1.0 |
#
# The scale belongs to the head as the model defines it, say 12 channels and 4 rotary ones: 1/√16 = 0.25, as in `call`.
# No axis above has that width, so the operator cannot know it.
#
# Is the answer right? An *oracle* is a second computation that shares no code with the first: plain loops in float64.

# %% [markdown] tags=["zh"] pair="fbf190-288e4f"
# FIA 对它们的要求，简要如下；全部规则见它的[契约页](../operators/npu_fused_infer_attention_score_v2.md)：
#
# | 参数 | 规则 |
# |---|---|
# | `query` | TND 布局：所有请求的行首尾相接，没有 batch 维 |
# | `query_rope`、`key_rope` | 旋转位置编码（RoPE）部分：要么都给，要么都不给；行与 query、key 一致 |
# | `actual_seq_qlen` | **累计值**：每个请求在 `query` 里的终点；最后一个等于 T |
# | `actual_seq_kvlen` | **逐请求**，因为键是分页的 |
# | `block_table` | 块表，int32，一个请求一行，按顺序列出它的页 |
# | `atten_mask` | 1 表示**遮住**；`sparse_mode` 为 3 时总是同一个 2048 x 2048 常量，对角线以上为 1 |
# | `sparse_mode` | 3：因果，一个请求的最后一行看到它的全部键 |
# | `num_query_heads` | 即 N；R 取真实模型的 512 时，必须是 2 的幂，最多 128 |
# | `softmax_scale` | 算子从不根据宽度推算；默认 1.0 |
#
# 缩放系数属于模型里原本定义的头，比如 12 个普通通道加 4 个旋转通道：1/√16 = 0.25，就是 `call` 里的值。上面没有哪个轴是这个宽度，所以算子无从得知。
#
# 答案对吗？*对照实现*（oracle）把同一个结果另算一遍，与被检验的代码没有一行共用：朴素的循环，float64。

# %%
def oracle():
    q, q_rope = query.cpu().double(), query_rope.cpu().double()
    keys = latent.cpu().double().view(-1, R)  # [slots, R]
    key_ropes = rope.cpu().double().view(-1, Dr)  # [slots, Dr]
    rows = []
    for start, end, kv_len, pages in ((0, 1, 20, (1, 2)), (1, 4, 22, (3, 4))):
        slots = [16 * page + offset for page in pages for offset in range(16)]
        for t in range(start, end):
            seen = slots[: kv_len - (end - 1 - t)]  # the last row sees all its keys
            scores = q[t] @ keys[seen].T + q_rope[t] @ key_ropes[seen].T  # [N, seen]
            rows.append((0.25 * scores).softmax(-1) @ keys[seen])  # [N, R]
    return torch.stack(rows)  # [T, N, R]


def right(out):
    return torch.allclose(out.cpu().double(), oracle(), atol=atol)


assert right(attend())

# %% [markdown] tags=["en"]
# ## A trace that succeeds proves only shapes
#
# Compilers and tracers run an operator on *meta* tensors, which have a shape and no data. For this form of FIA, shape
# inference comes down to two lines. Where torch_npu is installed, the cell uses torch_npu's own; elsewhere it uses
# these two lines. Either way the good call passes, and so do five wrong ones.

# %% [markdown] tags=["zh"] pair="1792ae-d672c9"
# ## 追踪（trace）成功只说明形状对
#
# 编译器和追踪器用 *meta* 张量运行算子，这种张量只有形状，没有数据。对 FIA 的这种形式，形状推导归根结底只有两行代码。
# 装了 torch_npu 时，单元格用 torch_npu 自带的推导，否则用这两行。无论哪种，正确的调用能通过，五个错误的调用也能通过。

# %%
NAME = "npu_fused_infer_attention_score_v2"
if not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{NAME}", "Meta"):
    shape_inference = torch.library.Library("npu", "IMPL")

    def infer(query, key, value, **rest):
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        return out, query.new_empty(0, dtype=torch.float32)

    shape_inference.impl(NAME, infer, "Meta")


def meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def trace(**changes):
    arguments = {name: meta(value) for name, value in (call | changes).items()}
    return fia(**arguments)[0].shape


assert trace() == attend().shape

# %%
wrong = [
    dict(actual_seq_qlen=[1, 3]), dict(actual_seq_kvlen=[20, 42]),
    dict(atten_mask=~mask), dict(num_query_heads=3),
    dict(block_table=block_table + 3),  # pages 4 to 7, of which only 4 exists
]
assert all(trace(**changes) == trace() for changes in wrong)

# %% [markdown] tags=["en"]
# ## The same calls, with a contract
#
# **Query lengths, per request.** "One row and three rows" was written down as it is spoken. FIA wants the ends.

# %% [markdown] tags=["zh"] pair="c0bd99-e78604"
# ## 同样的调用，有了契约
#
# **查询长度写成了逐请求。** 两个请求各有 1 行和 3 行，顺手就写成了 `[1, 3]`；FIA 要的却是各请求的终点，即 `[1, 4]`。

# %% tags=["raises-exception"] raises="ContractError" says="must equal the last element"
attend(actual_seq_qlen=[1, 3])

# %% [markdown] tags=["en"]
# Read it part by part; each part is also an attribute.
#
# - `operator`, `argument`, `got`: who refuses, and what. The last element is 3, and there are 4 rows.
# - `expected`: the rule with the numbers of this call, and what to change.
# - `rule`: its level. RELATION means that two arguments contradict each other.
# - `source`: where the rule is written. A device's own message is much the same: "queryT(21) must be equal to the last
#   element of actualSequenceLengthQ(20)" (vllm-ascend issue 6524).
# - `case`: the number in the [bug gallery](../bugs.md#sb-03). In SB-03 a graph ran on 72 rows and the list ended at 65.
# - `open_point`: only where no document settles the matter. Then the contract refuses to be safe, the `open` line asks
#   the question, and the name is what `assume` takes to let such calls pass.

# %% [markdown] tags=["zh"] pair="5c2764-8f8109"
# 逐项来读；每一项同时也是异常对象的一个属性。
#
# - `operator`、`argument`、`got`：哪个算子拒绝、拒绝哪个参数、实际得到什么。这里最后一个元素是 3，而行数是 4。
# - `expected`：代入本次数字的规则，以及该改什么。
# - `rule`：规则的级别。RELATION 表示两个参数互相矛盾。
# - `source`：规则的出处；cann-ops-transformer 是 CANN（昇腾的软件栈，相当于 CUDA）的一个算子仓库。
#   设备自己的报错也很像：“queryT(21) must be equal to the last element of
#   actualSequenceLengthQ(20)”（vllm-ascend issue 6524）。
# - `case`：[缺陷图鉴](../bugs.md#sb-03)里的编号。SB-03 里，录制好的计算图按 72 行运行，而列表只累计到 65。
# - `open_point`：只在文档没有定论时才有。这时契约为稳妥起见拒绝，`open` 一行写出问题；
#   这个名字就是 `assume` 的参数，用它可以放行这类调用。

# %%
from itertools import accumulate


def refusal(run):
    """The ContractError that run() raises, or None."""
    try:
        run()
    except ContractError as error:
        return error


found = refusal(lambda: attend(actual_seq_qlen=[1, 3]))
assert (found.operator, found.argument) == (NAME, "actual_seq_qlen")
assert (found.rule, found.case, found.open_point) == ("RELATION", "SB-03", "fia-short-sum")
assert right(attend(actual_seq_qlen=list(accumulate([1, 3]))))  # [1, 4]: mended

refused = [refusal(lambda changes=changes: attend(**changes)) for changes in wrong]
assert all(refused)  # all five that shape inference let pass

# %% [markdown] tags=["en"]
# **Key lengths, cumulative.** The opposite slip, one argument further.

# %% [markdown] tags=["zh"] pair="0e4b1b-c47ba0"
# **键长度写成了累计值。** 下一个参数，正好反过来错。

# %% tags=["raises-exception"] raises="ContractError" says="(not cumulative)"
ends = [20, 42]
attend(actual_seq_kvlen=ends)

# %% [markdown] tags=["en"]
# **The mask upside down.** PyTorch's `scaled_dot_product_attention` takes True as "may look". FIA takes 1 as "hidden".
# Both have the same shape and dtype, so a device has nothing to refuse: it would answer, and wrongly.

# %% [markdown] tags=["zh"] pair="e6b933-e5d4fc"
# **掩码反了。** PyTorch 的 `scaled_dot_product_attention` 里，True 表示“可以看”；FIA 里，1 表示“遮住”。
# 两者的形状和类型都一样，设备没有理由拒绝：它会照样算出结果，而结果是错的。

# %% tags=["raises-exception"] raises="ContractError" says="inverted"
may_look = torch.ones(2048, 2048, dtype=torch.bool, device=device).tril()
attend(atten_mask=may_look)

# %% [markdown] tags=["en"]
# Both mended:

# %% [markdown] tags=["zh"] pair="387bb8-e23450"
# 两处都改好：

# %%
starts = [0, *ends[:-1]]
lengths = [end - start for start, end in zip(starts, ends, strict=True)]  # [20, 22]
assert right(attend(actual_seq_kvlen=lengths, atten_mask=~may_look))

# %% [markdown] tags=["en"]
# **Five heads.** A model with 20 heads over 4 devices has 5 on each. With latents of the real width, 512, which is
# the query's width D, the kernel takes powers of two only. `audit` applies the rules of a device on any machine.

# %% [markdown] tags=["zh"] pair="5d6b4f-c5601c"
# **五个头。** 20 个头的模型分到 4 个设备，每个 5 个头。潜变量取真实宽度 512 时（也就是查询的宽度 D），
# 内核只接受 2 的幂个头。`audit` 在任何机器上都按设备的规则检查。

# %% tags=["raises-exception"] raises="ContractError" says="pad the heads with zeros to 8"
def decode(N, dtype=torch.bfloat16):
    """One query row of N heads over one page of 16 tokens, as wide as GLM-4.7-Flash."""
    torch.manual_seed(0)
    q, q_rope = torch.randn(1, N, 512), torch.randn(1, N, 64)  # [T, N, R], [T, N, Dr]
    c, c_rope = torch.randn(2, 16, 512), torch.randn(2, 16, 64)  # [pages, P, R], [.., Dr]
    table = torch.tensor([[1]]).to(device, torch.int32)  # [B, columns]
    tensors = dict(query=q, query_rope=q_rope, key=c, value=c, key_rope=c_rope)
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()} | dict(
        actual_seq_qlen=[1], actual_seq_kvlen=[16], block_table=table, block_size=16,
        softmax_scale=(192 + 64) ** -0.5, num_query_heads=N, num_key_value_heads=1,
        input_layout="TND",
    )


with audit():
    fia(**decode(5))

# %% [markdown] tags=["en"]
# The message says how to mend it: zero heads after the real ones, and the result cut back to five.

# %% [markdown] tags=["zh"] pair="c9f796-a1e0c3"
# 消息里写着怎么改：在真实的头后面填充全零的头，再把结果切回五个。

# %%
import torch.nn.functional as F

five = decode(5)
eight = five | dict(
    query=F.pad(five["query"], (0, 0, 0, 3)),  # [T, Np, R]
    query_rope=F.pad(five["query_rope"], (0, 0, 0, 3)),  # [T, Np, Dr]
    num_query_heads=8,
)
with audit():
    out = fia(**eight)[0][:, :5]  # [T, N, R]

names = ("query", "query_rope", "key", "key_rope")
exact = {name: five[name].cpu().double() for name in names}
keys, key_ropes = exact["key"][1], exact["key_rope"][1]  # [P, R], [P, Dr]: page 1
scores = exact["query"][0] @ keys.T + exact["query_rope"][0] @ key_ropes.T  # [N, P]
expected = (scores / 16).softmax(-1) @ keys  # [N, R]
assert torch.allclose(out[0].cpu().double(), expected, atol=5e-2)

# %% [markdown] tags=["en"]
# **The scale forgotten.** 1.0 is legal: the queries may come scaled already. So this is a warning and no error. The
# shape is right, and the numbers are not.

# %% [markdown] tags=["zh"] pair="8f3777-80e5d1"
# **忘了缩放系数。** 1.0 是合法的：查询可能事先缩放过。所以这里只警告，不报错。形状是对的，数值不对。

# %%
import warnings

forgotten = dict(eight)
del forgotten["softmax_scale"]
with warnings.catch_warnings(record=True) as caught, audit():
    warnings.simplefilter("always")
    unscaled = fia(**forgotten)[0][:, :5]  # [T, N, R]
print(caught[0].message)
assert unscaled.shape == out.shape
assert not torch.allclose(unscaled[0].cpu().double(), expected, atol=0.5)

# %% [markdown] tags=["en"]
# **A list in place of a tensor.** The dispatcher refuses this itself, on every path, before any contract.

# %% [markdown] tags=["zh"] pair="fa2287-802450"
# **该给张量却给了列表。** 这由分发器自己拒绝，三条路径都一样，轮不到契约。

# %% tags=["raises-exception"] raises="RuntimeError" says="Expected a value of type 'Tensor'"
rows = torch.ones(3, 1, R, dtype=dtype, device=device)  # [T, 1, R]
pool = torch.zeros(5, 16, 1, R, dtype=dtype, device=device)  # [pages, P, 1, R]
slots = [16, 17, 18]
npu.npu_scatter_pa_kv_cache(rows, rows, pool, pool.clone(), slots, cache_mode="Norm")

# %%
index = torch.tensor(slots, device=device)  # [T]
with rules():
    npu.npu_scatter_pa_kv_cache(rows, rows, pool, pool.clone(), index, cache_mode="Norm")
written = pool.view(-1, R).cpu().any(-1)  # [slots]
assert written.nonzero().flatten().tolist() == slots  # mended

# %% [markdown] tags=["en"]
# ## Lengths: cumulative or not, list or tensor
#
# *Packed* keys lie one request after the other, without pages. BSND is the layout with a batch
# axis; S is the number of rows a request has room for.
#
# | operator | argument | an entry is | container |
# |---|---|---|---|
# | FIA, TND, paged keys | `actual_seq_qlen` | end of a request; the last is T | host list |
# | | `actual_seq_kvlen` | length of a request | host list |
# | FIA, TND, packed keys | both | end of a request; the last is T, and the rows of key | host list |
# | FIA, BSND | both | length of a request; None: all of S | host list |
# | FIA | `block_table` | page ids, one row a request | int32 tensor |
# | `npu_kv_rmsnorm_rope_cache` | `index` | slot of a row; negative: not written | int64 tensor |
# | `npu_scatter_pa_kv_cache` | `slot_mapping` | slot of a row; negative: refused | int32 or int64 tensor |
# | `npu_grouped_matmul` | `group_list` | `group_list_type` 0 (default): end of a group; 1: its size | int64 tensor |
#
# A host list becomes part of the launch, and a recorded graph keeps the list it was recorded with until it is given
# a new one. A tensor is read where it lies, so a graph sees what was written there last. The schemas say which is
# which:

# %% [markdown] tags=["zh"] pair="591e8f-a31a2a"
# ## 长度：累计还是逐个，列表还是张量
#
# *打包*的键按请求首尾相接，没有页。BSND 是带 batch 维的布局，S 是给每个请求预留的行数。
#
# | 算子 | 参数 | 每一项是 | 容器 |
# |---|---|---|---|
# | FIA，TND，分页的键 | `actual_seq_qlen` | 一个请求的终点；最后一个等于 T | 主机列表 |
# | | `actual_seq_kvlen` | 一个请求的长度 | 主机列表 |
# | FIA，TND，打包的键 | 两者 | 一个请求的终点；最后一个分别等于 T 和 key 的行数 | 主机列表 |
# | FIA，BSND | 两者 | 一个请求的长度；None 表示 S 行全用 | 主机列表 |
# | FIA | `block_table` | 页号，一个请求一行 | int32 张量 |
# | `npu_kv_rmsnorm_rope_cache` | `index` | 一行的槽位；负数：不写 | int64 张量 |
# | `npu_scatter_pa_kv_cache` | `slot_mapping` | 一行的槽位；负数：拒绝 | int32 或 int64 张量 |
# | `npu_grouped_matmul` | `group_list` | `group_list_type` 0（默认）：一组的终点；1：组的大小 | int64 张量 |
#
# 主机列表随算子下发，成为下发参数的一部分；录制好的计算图会一直用录制时的那份，直到给它新的。
# 张量则在执行时从原地址读取，计算图看到的是最后写进去的内容。哪个是哪个，schema 里写着：

# %%
def container(operator, argument):
    arguments = getattr(npu, operator).default._schema.arguments
    [found] = [str(a.type) for a in arguments if a.name == argument]
    return "tensor" if "Tensor" in found else "list"


assert container(NAME, "actual_seq_qlen") == "list"
assert container(NAME, "actual_seq_kvlen") == "list"
assert container(NAME, "block_table") == "tensor"
assert container("npu_kv_rmsnorm_rope_cache", "index") == "tensor"
assert container("npu_scatter_pa_kv_cache", "slot_mapping") == "tensor"
assert container("npu_grouped_matmul", "group_list") == "tensor"

# %% [markdown] tags=["en"]
# ## Poison: what a device leaves unwritten
#
# Some wrong calls are legal. `npu_grouped_matmul` multiplies groups of rows, each by a matrix of its own: the experts
# of a mixture-of-experts layer ([chapter 6](ch06_glm.md)). Six rows go to three experts: 1, 2 and 3 rows. `group_list`
# holds these counts, but `group_list_type` stays at its default 0, so they are read as ends, and each expert gets 1
# row. A list that covers fewer rows than `x` has is allowed (a device that holds only some experts needs it), so
# nothing is refused. A device leaves the other rows of the output as the memory was. The reference kernel *poisons*
# them with NaN, so that a wrong read shows at once instead of working by luck.
#
# `OPERATORS["npu_x"]` is that reference operator itself, contract included. On a laptop it stands behind
# `torch.ops.npu`; it can be called by name anywhere, on CPU tensors.

# %% [markdown] tags=["zh"] pair="6c1fe2-c82d80"
# ## 投毒：设备没有写的地方
#
# 有些错误的调用是合法的。`npu_grouped_matmul` 把行分成几组，每组乘以自己的矩阵，也就是混合专家（MoE）层的各个专家，
# 见[第 6 章](ch06_glm.md)。设六行分给三个专家，分别 1、2、3 行。`group_list` 里放的是这些数量，
# 而 `group_list_type` 还是默认的 0，于是它们被当成终点，每个专家只拿到 1 行。总数少于行数是允许的，
# 因为只持有部分专家的设备需要这样，所以这个调用不会被拒绝。设备不会碰输出的其余行，那里仍是内存中原有的内容。
# 参考内核则给它们*投毒*，填上 NaN：读错了会马上暴露，而不是凭运气“正常工作”。
#
# `OPERATORS["npu_x"]` 就是这个参考算子本身，包括契约。在笔记本电脑上，`torch.ops.npu` 背后执行的就是它；
# 在任何地方都可以按名字直接调用它，传入 CPU 张量即可。

# %%
x, experts = torch.randn(6, 8), torch.randn(3, 8, 4)  # [T, H], [E, H, out]
counts = torch.tensor([1, 2, 3])  # [E]


def grouped(group_list, group_list_type):
    return OPERATORS["npu_grouped_matmul"](
        [x], [experts], group_list=group_list, group_list_type=group_list_type,
        split_item=2, group_type=0,
    )[0]  # [T, out]


assert grouped(counts, 0)[3:].isnan().all()  # as ends: a row each, and three unwritten
of_row = torch.repeat_interleave(torch.arange(3), counts)  # [T]: each row's expert
expected = torch.einsum("th,tho->to", x.double(), experts[of_row].double())  # [T, out]
assert torch.allclose(grouped(counts, 1).double(), expected, atol=1e-5)  # mended

# %% [markdown] tags=["en"]
# ## Levels and profiles
#
# Each rule has a level, and a profile says which levels count:
#
# | level | about | `device` | `host` (default) | `paper` |
# |---|---|---|---|---|
# | RELATION | rows, counts and lengths that must agree | yes | yes | yes |
# | SIZE | widths, page sizes, head counts | yes | yes | no |
# | DTYPE | element types | yes | yes, fp32 and fp64 pass too | no |
#
# RELATION is never off: no choice of sizes makes a contradiction true. `paper` is for numbers that fit on a page.
# `device` is what `audit` applies.

# %% [markdown] tags=["zh"] pair="2ea0db-895ebf"
# ## 级别与配置档
#
# 每条规则有一个级别；配置档（profile）决定哪些级别算数：
#
# | 级别 | 管什么 | `device` | `host`（默认） | `paper` |
# |---|---|---|---|---|
# | RELATION | 必须一致的行数、个数、长度 | 查 | 查 | 查 |
# | SIZE | 宽度、页大小、头数 | 查 | 查 | 不查 |
# | DTYPE | 元素类型 | 查 | 查，但 fp32 和 fp64 也放行 | 不查 |
#
# RELATION 永远不关：尺寸怎么取，自相矛盾的参数都不会变对。`paper` 用于一页纸写得下的小尺寸。`device` 是 `audit` 所用的配置档。

# %%
from trueup.core.ops.contract import Check


def levels(arguments):
    """The level of the rule that 'device', 'host' and 'paper' see broken, or None."""
    contract, found = OPERATORS[NAME].contract, []  # the contract alone computes nothing
    for name in ("device", "host", "paper"):
        with profile(name):
            error = refusal(lambda: contract(Check(NAME), **arguments))
        found.append(error and error.rule)
    return found


assert levels(decode(5)) == ["SIZE", "SIZE", None]
assert levels(decode(8, torch.float32)) == ["DTYPE", None, None]
contradiction = decode(8) | dict(actual_seq_qlen=[2])
assert levels(contradiction) == ["RELATION", "RELATION", "RELATION"]

# %% [markdown] tags=["en"]
# ## What real engines do
#
# - vllm-ascend (`vllm_ascend/attention/mla_v1.py`) extends the cumulative list until it ends at the padded T, by at
#   most 16 rows a request, and pads heads with zeros to a power of two. Later changes (pull requests 13511 and 15882)
#   drop the head padding for newer kernels.
# - sglang (`srt/hardware_backend/npu/attention/ascend_backend.py`) pads to the smallest legal head count.
# - vllm-ascend (`vllm_ascend/attention/attention_mask.py`) builds the 2048 x 2048 mask, and passes None where attention
#   is not causal.
#
# Each states the rules where it calls. In trueup a rule stands in one place, the contract of its operator.

# %% [markdown] tags=["zh"] pair="a0ca31-1a0523"
# ## 真实引擎怎么做
#
# - vllm-ascend（`vllm_ascend/attention/mla_v1.py`）把累计列表往后延伸到填充后的 T，每个补出来的请求最多 16 行；
#   头用零填充到 2 的幂。后来的改动（pull request 13511、15882）针对较新的内核去掉了头的填充。
# - sglang（`srt/hardware_backend/npu/attention/ascend_backend.py`）把头填充到最小的合法个数。
# - vllm-ascend（`vllm_ascend/attention/attention_mask.py`）构造 2048 x 2048 掩码，非因果时传 None。
#
# 它们把规则写在调用的地方。在 trueup 里，一条规则只写在一处：该算子的契约。

# %% [markdown] tags=["en"]
# ## Exercises
#
# **1.** `attend(atten_mask=~mask, actual_seq_qlen=[1, 3], actual_seq_kvlen=[20, 42])` has three faults, and a contract
# stops at the first one it meets. Mend them one message at a time. In which order do they come?

# %% [markdown] tags=["zh"] pair="cbb30f-7020a3"
# ## 练习
#
# **1.** `attend(atten_mask=~mask, actual_seq_qlen=[1, 3], actual_seq_kvlen=[20, 42])` 有三处错，契约遇到第一处就停。
# 请按消息逐个改正。这三处错误是按什么顺序报出来的？

# %% tags=["solution"]
faults = dict(atten_mask=~mask, actual_seq_qlen=[1, 3], actual_seq_kvlen=[20, 42])
order = []
while error := refusal(lambda: attend(**faults)):
    order.append(error.argument)
    del faults[error.argument]  # back to the good value
assert order == ["actual_seq_qlen", "actual_seq_kvlen", "atten_mask"]

# %% [markdown] tags=["en"]
# **2.** Cumulative key lengths were refused because 42 tokens do not fit into two pages of 16. Give the block table a
# third column, of zeros. Is `[20, 42]` still refused? What finds the fault now?

# %% [markdown] tags=["zh"] pair="03ae5f-5dfa38"
# **2.** 累计的键长度被拒绝，是因为 42 个词元放不进两个 16 行的页。给块表加上全零的第三列，`[20, 42]` 还会被拒绝吗？
# 这时靠什么发现错误？

# %% [markdown] tags=["en", "solution"]
# It passes: three pages hold 48 rows, so 42 is a possible length. No contract knows the length you meant. The oracle
# finds the fault, in the rows of the second request only.

# %% [markdown] tags=["zh", "solution"] pair="93b7de-bca838"
# 会通过：三页有 48 行，42 是个可能的长度。没有哪个契约知道你本来想要的长度。
# 对照实现能发现错误：只有第二个请求的行对不上。

# %% tags=["solution"]
wider = F.pad(block_table, (0, 1))  # [B, 3]
silent = attend(block_table=wider, actual_seq_kvlen=[20, 42]).cpu().double()  # [T, N, R]
assert torch.allclose(silent[:1], oracle()[:1], atol=atol)
assert not torch.allclose(silent[1:], oracle()[1:], atol=atol)

# %% [markdown] tags=["en"]
# **3.** In `npu_grouped_matmul`, can counts be read as ends, be accepted, leave no NaN, and still be wrong?

# %% [markdown] tags=["zh"] pair="193948-0c1f1f"
# **3.** 在 `npu_grouped_matmul` 里，把数量当成终点，既被接受、又不留下 NaN、结果还是错的，可能吗？

# %% [markdown] tags=["en", "solution"]
# No. Without NaN the last end is the number of rows, which is the sum of the counts. So all other counts are 0, and
# both readings mean the same. Where the contract is silent, poison speaks.

# %% [markdown] tags=["zh", "solution"] pair="2466f1-adba19"
# 不可能。没有 NaN，说明最后一个终点等于行数，也就是数量之和；那么其余的数量都是 0，两种读法意思相同。
# 契约查不出来的，投毒能暴露出来。

# %% tags=["solution"]
from itertools import product

silent_lists = []
for trial in map(torch.tensor, product(range(7), repeat=3)):
    if trial.sum() != len(x) or refusal(lambda trial=trial: grouped(trial, 0)):
        continue  # not counts of six rows, or refused
    if not grouped(trial, 0).isnan().any():
        silent_lists.append(trial.tolist())
        assert torch.equal(grouped(trial, 0), grouped(trial, 1))
assert silent_lists == [[0, 0, 6]]

# %% [markdown] tags=["en"]
# ## Check your own call
#
# 1. In a clone: `pip install ./packages/core`. That is all it takes.
# 2. In your file, before `import torch`: `from trueup.core import audit, load`, and `load()`.
# 3. Paste the call into `with audit():`. Tensors go to the CPU where there is no NPU; big ones may be zeros of the same
#    shape and dtype. Lengths, block table, slots and mask need their real values: they are what a contract reads.
# 4. If a ContractError comes, do what `expected` says, and run it again.
# 5. If none comes and the numbers are still wrong, write the oracle: ten lines, as above.
#
# Calls inside a long run need no pasting: [record them](../how-to/explain.md#capture), and `trueup explain` checks the
# file. `audit` also counts calls of operators that trueup does not know, in `unknown`. `checked` counts the calls that
# passed, so a refused one is not in it. A pasted norm, with another layer's weight, and then mended:

# %% [markdown] tags=["zh"] pair="7e6a13-95e9d4"
# ## 检查你自己的调用
#
# 1. 在克隆下来的仓库目录里运行 `pip install ./packages/core`，装这一个就够。
# 2. 在你的文件里，`import torch` 之前写 `from trueup.core import audit, load`，再调用 `load()`。
# 3. 把调用贴进 `with audit():`。没有 NPU 时，张量放在 CPU 上；
#    大张量可以用同形状、同类型的全零张量代替。长度、块表、槽位和掩码要用真实的值：
#    契约读的正是它们。
# 4. 如果抛出 ContractError，就照 `expected` 修改，再运行。
# 5. 如果不报错而数仍然不对，写一个对照实现：像上面那样，十行左右。
#
# 长时间运行中的调用不必手工粘贴：[把它们录下来](../how-to/explain.md#capture)，再用 `trueup explain` 检查录下的文件。
# trueup 不认识的算子，`audit` 会把调用次数记在 `unknown` 里；`checked` 只数通过了检查的调用，被拒绝的不算。
# 下面贴进来一个归一化，权重拿成了别处的，随后改正：

# %%
x = torch.zeros(3, 2048, dtype=torch.bfloat16, device=device)  # [T, H]
weight = torch.ones(512, dtype=torch.bfloat16, device=device)  # [R]

with audit() as calls:
    error = refusal(lambda: npu.npu_rms_norm(x, weight, 1e-5))
    npu.npu_rms_norm(x, torch.ones_like(x[0]), 1e-5)
print(error)
assert error.argument == "gamma"
assert calls.checked == {"npu_rms_norm": 1} and not calls.unknown

# %% [markdown] tags=["en"]
# ## On an NPU machine
#
# Install `torch_npu` beside the packages and run all cells. The set-up cell then takes the widths 512 and 64 and
# bfloat16, and `audit` checks every call before a kernel of torch_npu gets it. The oracle then judges your device. No
# device has run this chapter yet; [what ran where](../what-ran-where.md) keeps the account.

# %% [markdown] tags=["zh"] pair="00551d-e710cc"
# ## 在 NPU 机器上
#
# 除这些软件包外再装上 `torch_npu`，然后运行全部单元格。准备单元格会改用 512 和 64 的宽度以及 bfloat16，
# `audit` 在 torch_npu 的内核收到调用之前逐一检查。这时，对照实现检验的就是你的设备。
# 本章还没有在任何设备上运行过，详见[哪些在哪里跑过](../what-ran-where.md)。
