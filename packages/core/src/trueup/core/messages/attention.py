"""Messages of the attention operators: mostly lengths, rows and block tables that describe different requests."""
from trueup.core.messages.entry import Message, Text

FIA = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2")
QUERY_LENGTHS = ("actual_seq_lengths", "actual_seq_qlen")  # names in the first version and in the second
KEY_LENGTHS = ("actual_seq_lengths_kv", "actual_seq_kvlen")

MESSAGES = (
    Message(
        "last-query-length", Text("Query rows and the last query length differ", "查询行数与最后一个查询长度不等"),
        r"queryT\((?P<rows>\d+)\) must be equal to the last element of actualSequenceLengthQ\((?P<last>\d+)\)",
        "When layout is TND, queryT(21) must be equal to the last element of actualSequenceLengthQ(20)",
        "vllm-ascend issue #6524",
        Text("query has {rows} rows, the last cumulative query length is {last}: they must be equal.",
             "query 有 {rows} 行，最后一个累计查询长度是 {last}：二者必须相等。"),
        Text("The rows were padded after the lengths were made. Give the rows behind the last length to a request of "
             "their own, with a key length and a block table row, or cut the query. Raising the last length passes "
             "this check and is wrong: a real request then has more queries, and each sees fewer keys.",
             "先算出了长度，后填充了行。把最后一个长度之后的行划给单独的请求，并给它键长度和块表的一行；或者把 query "
             "截短。"
             "只把最后一个长度改大能通过检查，但结果是错的：那个真实请求的查询变多，每个查询看到的键反而变少。"),
        FIA, ("query", *QUERY_LENGTHS), "SB-03"),
    Message(
        "last-key-length", Text("Key rows and the last key length differ", "键的行数与最后一个键长度不等"),
        r"keyT\((?P<rows>\d+)\) and valueT\(\d+\)\s+must be equal to the last element of "
        r"actualSe\w+KV\((?P<last>\d+)\)",
        "When layout is TND and PA not enabled, keyT(256) and valueT(256) must be equal to the last element of "
        "actualSeqenceLengthKV(9)", "cann-ops-transformer: op_host/fused_infer_attention_score_tiling.cpp",
        Text("key and value have {rows} rows, the last cumulative key length is {last}: they must be equal where keys "
             "are packed (layout TND without a block table).",
             "key 和 value 有 {rows} 行，最后一个累计键长度是 {last}：键按打包格式存放时（布局 TND、没有块表），"
             "二者必须相等。"),
        Text("Without a block table key lengths are cumulative. For a paged cache pass block_table and block_size, and "
             "the plain length of each request.",
             "没有块表时，键长度是累计值。键在分页缓存中时，应传 block_table 和 block_size，"
             "并给出每个请求各自的长度。"),
        FIA, ("key", "value", *KEY_LENGTHS), "SB-03"),
    Message(
        "few-key-lengths", Text("Fewer key lengths than requests", "键长度比请求少"),
        r"actual sequence lengths shape size is (?P<lengths>\d+), it should be bigger or equal to "
        r"batch size\((?P<batch>\d+)\)",
        "the key/value's actual sequence lengths shape size is 9, it should be bigger or equal to batch size(16) or "
        "equal to 1", "vllm-ascend issue #8107",
        Text("There are {lengths} key lengths and {batch} requests, counted by the query lengths or the batch axis.",
             "键长度有 {lengths} 个，而按查询长度或 batch 轴算，请求有 {batch} 个。"),
        Text("Make both lists from the same plan, after padding. A padded request needs a key length, too.",
             "两个列表都从填充之后的同一份规划产生。填充出来的请求同样需要键长度。"),
        FIA, (*KEY_LENGTHS, *QUERY_LENGTHS), "SB-04"),
    Message(
        "key-lengths-and-batch", Text("Key lengths and requests differ in number", "键长度与请求的个数不等"),
        r"The size\((?P<lengths>\d+)\) of actualSeqLengthsKv is not equal to the batchSize\((?P<batch>\d+)\)",
        "The size(20) of actualSeqLengthsKv is not equal to the batchSize(21)", "vllm-ascend PR #10769",
        Text("There are {lengths} key lengths and {batch} requests by the query lengths.",
             "键长度有 {lengths} 个，而按查询长度算，请求有 {batch} 个。"),
        Text("Padding added a request that only some lists have room for. Give all lists of requests one capacity, "
             "and let a slice past the end fail.",
             "填充多出了一个请求，而有些列表没有它的位置。所有按请求存放的列表应当容量一致，切片越过末尾时应当报错。"),
        FIA, (*KEY_LENGTHS, *QUERY_LENGTHS), "SB-04"),
    Message(
        "block-table-shape", Text("The block table is too small", "块表太小"),
        r"block table shape should be \[(?P<batch>\d+), ?>=(?P<pages>\d+)\], now is \[(?P<rows>\d+), "
        r"(?P<columns>\d+)\]",
        "When page attention enable, block table shape should be [21, >=29], now is [20, 1104].",
        "vllm-ascend PR #10769",
        Text("block_table has {rows} rows for {batch} requests, and {columns} columns where the longest request needs "
             "{pages}.", "块表有 {rows} 行，请求有 {batch} 个；有 {columns} 列，而最长的请求需要 {pages} 列。"),
        Text("Too few rows: padding added a request without a block table row. Too few columns: the width counts the "
             "tokens of a plain step, not the drafts of a verify step.",
             "行不够：填充多出的请求没有块表的一行。列不够：宽度按普通步的词元数算，没有把验证步的草稿算进去。"),
        FIA, ("block_table",), "SB-04", ("bugs/#sb-13",)),
    Message(
        "negative-length", Text("A negative key length", "键长度为负"),
        r"actual sequence lengths\[(?P<request>\d+)\] must be greater than or equal to 0, but it i\s*s "
        r"(?P<length>-\d+)",
        "the value of the key/value's actual sequence lengths[0] must be greater than or equal to 0, but it is -294",
        "lmdeploy PR #4316",
        Text("Request {request} has {length} keys.", "请求 {request} 的键长度是 {length}。"),
        Text("Lengths come from what is committed, and a padded request has length 1 on a scratch page. Look for a "
             "subtraction (history, window, rejected drafts) from a request that this step did not plan.",
             "长度取自已提交的部分；填充出来的请求长度为 1，指向一个公用的页。查一查哪里做了减法（历史、窗口、"
             "被拒绝的草稿），"
             "而那个请求并不在本步的规划里。"),
        FIA, KEY_LENGTHS),
    Message(
        "head-widths", Text("A head width that layout TND does not take", "布局 TND 不支持的头宽度"),
        r"queryD\((?P<query>\d+)\),? (?:or )?keyD\((?P<key>\d+)\).{0,30}?must be.{0,40}?192",
        "When layout is TND, queryD(256), keyD(256) and valueD(256) must be same equal 192/128/64, or queryD and keyD "
        "equal 192 and valueD equal 128.", "vllm-ascend PR #9632",
        Text("Heads of width {query} (query) and {key} (key): packed attention takes 64, 128 and 192, or 192 with "
             "values of 128.",
             "头的宽度是 {query}（query）和 {key}（key）：打包格式的注意力只支持 64、128、192，以及 192 配宽度 128 "
             "的值。"),
        Text("For a width of 256 call once per request in layout BSND. MLA with a width of 192 and values of 128 is "
             "among the legal pairs. Versions of CANN differ here.",
             "宽度 256 时，改用布局 BSND，逐个请求调用。MLA 的 192 配 128 是合法的组合。各版本的 CANN 在这里有差别。"),
        FIA, ("query", "key", "value", "input_layout")),
    Message(
        "paged-tnd", Text("This version takes no block table in layout TND", "该版本的 TND 布局不支持块表"),
        r"When layout is TND, not support Page Attention",
        "When layout is TND, not support Page Attention", "vllm-ascend issue #4373",
        Text("A block table together with packed queries, on a CANN that does not have this form.",
             "同时传了块表和打包格式的查询，而所装的 CANN 没有这种形式。"),
        Text("Update CANN, or use a batched layout with the block table. Check first that layout and lengths are those "
             "of a decode.", "升级 CANN，或改用按 batch 排列的布局。先确认布局和长度确实是解码用的。"),
        FIA, ("input_layout", "block_table")),
    Message(
        "mla-heads", Text("A number of heads that absorbed MLA does not take", "吸收式 MLA 不支持的头数"),
        r"allowed number of queries per kv when enabling both MLA and Graph mode only support \{(?P<heads>[\d, ]+)\}",
        "The allowed number of queries per kv when enabling both MLA and Graph mode only support {32, 64, 128}, Thus "
        "this is not supported for DeepSeek-V2-Lite, as it only has 16 attention heads", "vllm-ascend issue #1451",
        Text("The query heads of one rank must be one of {heads} here; newer operators take powers of two from 1 to "
             "128.", "这里每个 rank 的查询头数必须是 {heads} 之一；较新的算子接受 1 到 128 之间的 2 的幂。"),
        Text("Pad the query heads with zeros to the next legal number, and cut the result before the value "
             "projection. GLM-4.7-Flash has 20 heads and needs 32.",
             "用零把查询头填充到下一个合法的数，并在值投影之前把结果截回。GLM-4.7-Flash 有 20 个头，要填充到 32。"),
        FIA, ("num_heads", "num_query_heads"), "SB-06"),
    Message(
        "query-shape", Text("The query's shape is not what the other arguments say", "query 的形状与其他参数说的不符"),
        r"\[CheckQShape\] query layout is (?P<layout>\w+), shape \[(?P<got>[\d, ]+)\] should be equal to "
        r"\[(?P<expected>[\d, ]+)\]",
        "[CheckQShape] query layout is BNSD, shape [1, 5, 25200, 128] should be equal to [1, 20, 25200, 128].",
        "sglang PR #23572",
        Text("query is [{got}] in layout {layout}; number of heads, lengths and key say [{expected}].",
             "query 按布局 {layout} 是 [{got}]；而按头数、长度和键，应当是 [{expected}]。"),
        Text("Mostly the number of heads: pass that of this rank, as the tensor has it, not the model's.",
             "多半是头数：应当传本 rank 的头数，也就是张量里实际的头数，而不是整个模型的。"),
        FIA, ("query", "num_heads", "num_query_heads")),
    Message(
        "no-mask", Text("A mask is missing", "缺少掩码"),
        r"attenMask should not be null when sparse_mode is (?P<mode>\d)",
        "attenMask should not be null when sparse_mode is 2.", "vllm PR #8054",
        Text("sparse_mode {mode} reads atten_mask, and there is none.",
             "sparse_mode {mode} 要读 atten_mask，却没有传。"),
        Text("Pass torch.ones(2048, 2048, dtype=torch.bool).triu(1), whatever the lengths are: 1 excludes.",
             "无论长度多少，都传 torch.ones(2048, 2048, dtype=torch.bool).triu(1)：1 表示排除。"),
        FIA, ("atten_mask", "sparse_mode")),
    Message(
        "topk-rows", Text("Index rows and query rows differ", "索引的行数与查询的行数不等"),
        r"sparse_indices layout is (?P<layout>\w+), shape (?:is )?\[(?P<got>[\d, ]+)\],?\s+(?:expected shape is|should "
        r"be equal to) \[(?P<expected>[\d, ]+)\]",
        "EZ9999 sparse_indices layout is TND, shape is [4096, 1, 2048],\n       expected shape is [512, 1, 2048].\n"
        "       [FUNC:CompareShape][FILE:sparse_flash_attention_tiling.cpp][LINE:570]", "vllm-ascend PR #10520",
        Text("sparse_indices is [{got}], query says [{expected}]: one row of indices for each row of queries.",
             "sparse_indices 是 [{got}]，按 query 应当是 [{expected}]：每个查询行对应一行索引。"),
        Text("The indices were made in another forward, or on another rank's rows. Bind them to the layout they were "
             "made for, and pad or cut them with the queries; pad rows select nothing (-1).",
             "索引来自另一次前向，或来自另一个 rank 的行。把索引与产生它的布局绑定，并随查询一起填充或截断；"
             "填充行不选任何键（-1）。"),
        ("npu_sparse_flash_attention",), ("sparse_indices", "query"), "SB-02"),
    Message(
        "indexer-requests", Text("Lengths and block table describe different requests", "长度和块表描述的请求数不同"),
        r"actual_seq_lengths_query\S*.{0,50}?block_table dim 0(?: are|:) (?P<query>\d+)[,/] ?(?P<key>\d+)[,/] "
        r"?(?P<table>\d+)",
        "actual_seq_lengths_query/key/block_table dim 0: 3/2/2", "sglang PR #32762",
        Text("{query} query lengths, {key} key lengths and {table} rows of block_table: all three count requests.",
             "查询长度 {query} 个，键长度 {key} 个，块表 {table} 行：三者都应当等于请求数。"),
        Text("The query lengths were counted in padded rows, the others in the real batch. Make all of them from one "
             "plan after padding, or cut the query to the real rows.",
             "查询长度是按填充后的行算的，另外两个按真实的 batch 算。三者都应当出自填充之后的同一份规划，"
             "或者把查询截到真实的行。"),
        ("npu_lightning_indexer", "npu_sparse_flash_attention"),
        ("actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"), "SB-01"),
)
