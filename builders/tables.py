"""The pages that each live request owns: device tables with a validated host interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from builders.devices import stage_into, staged
from builders.errors import BatchError, require, require_counts

UNALLOCATED = -1
"""Block-table entry without a page. Kernels never read it, because lengths stop before it."""


class RequestTables:
    """Per-request state that changes when requests join, leave or grow; shared by all batch shapes.

    It rejects page ids outside its pools, because nothing else checks them before a kernel follows them.

    block_tables   int32 [num_groups, max_reqs, max_pages]   page ids; padding rows and unowned entries are -1
    token_limits   int32 [max_reqs]   tokens the request can hold (its pages or the length limit); padding rows are 0
    overflow       int32 [max_reqs]   set when a request reaches its limit and cannot advance; read it when convenient
    page_sizes     int32 [num_groups]

    Raises BatchError if there is no KV group, if page sizes and page counts differ in number, for sizes below 1, and
    for pools or requests with more tokens than an int32 can count.
    """

    def __init__(
        self,
        *,
        page_sizes: Sequence[int],
        num_pages: Sequence[int],
        max_reqs: int,
        max_seq_len: int,
        device: torch.device | str,
    ) -> None:
        require(
            len(page_sizes) == len(num_pages) > 0,
            f"every KV group needs a page size and a page count, got {len(page_sizes)} sizes and "
            f"{len(num_pages)} counts; no table was allocated. Pass one of each per group.",
        )
        sizes = (*page_sizes, *num_pages, max_reqs, max_seq_len)
        require_counts("page sizes, page counts, max_reqs and max_seq_len", sizes)
        require(
            min(sizes) >= 1,
            f"page sizes, page counts, max_reqs and max_seq_len must be 1 or more, got {list(page_sizes)}, "
            f"{list(num_pages)}, {max_reqs} and {max_seq_len}; no request would fit, so no table was allocated. Raise "
            "the values below 1.",
        )
        slots = max(size * count for size, count in zip(page_sizes, num_pages, strict=True))
        require(
            max(slots, max_seq_len) < 1 << 31,
            f"a pool and a request must hold fewer than {1 << 31} tokens, got {slots} slots and max_seq_len "
            f"{max_seq_len}; kernels count them in 32 bits. Make the pool or max_seq_len smaller.",
        )
        self.page_sizes_host = tuple(page_sizes)
        self.num_pages = tuple(num_pages)
        self.max_reqs = max_reqs
        self.max_seq_len = max_seq_len
        self.max_pages = max(-(-max_seq_len // size) for size in page_sizes)
        shape = (len(page_sizes), max_reqs, self.max_pages)
        self.block_tables = torch.full(shape, UNALLOCATED, dtype=torch.int32, device=device)
        # With its index, so that later allocations do not land on whichever device is current by then.
        self.device = self.block_tables.device
        self.token_limits = torch.zeros(max_reqs, dtype=torch.int32, device=self.device)
        self.overflow = torch.zeros(max_reqs, dtype=torch.int32, device=self.device)
        self.page_sizes = torch.tensor(self.page_sizes_host, dtype=torch.int32, device=self.device)
        self.num_live = 0
        self.limits_host: tuple[int, ...] = ()
        self.longest = 0
        """The largest token limit of the live requests."""
        self.writable_host: tuple[int, ...] = ()
        self._rows: list[list[list[int]]] = [[] for _ in page_sizes]
        self._allocated: list[set[int]] = [set() for _ in page_sizes]

    @property
    def num_groups(self) -> int:
        return len(self.page_sizes_host)

    def load(
        self,
        pages: Sequence[Sequence[Sequence[int]]],
        token_limits: Sequence[int],
        *,
        writable_from: Sequence[int] | None = None,
    ) -> None:
        """Replace the tables: ``pages[group][request]`` lists page ids, ``token_limits[request]`` bounds its tokens.

        writable_from: the first position that each request can still write. Requests can share pages that lie entirely
        before it (a common prefix); every other page belongs to one request. None: every page is writable.
        Raises BatchError, and changes nothing, for a limit beyond the pages or the table, an id out of range or a
        shared writable page.
        """
        num_reqs = len(token_limits)
        starts = tuple(writable_from) if writable_from is not None else (0,) * num_reqs
        self._check_shape(pages, token_limits, starts)
        for group, rows in enumerate(pages):
            self._check_group(group, rows, token_limits, starts)
        host = torch.full(tuple(self.block_tables.shape), UNALLOCATED, dtype=torch.int32, device="cpu")
        for group, rows in enumerate(pages):
            lens = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
            owned = torch.arange(self.max_pages, device="cpu") < lens[:, None]
            host[group, :num_reqs][owned] = torch.tensor([*chain(*rows)], dtype=torch.int32, device="cpu")
        limits = torch.zeros(self.max_reqs, dtype=torch.int32, device="cpu")
        limits[:num_reqs] = torch.tensor(list(token_limits), dtype=torch.int32, device="cpu")
        for source, table in ((host, self.block_tables), (limits, self.token_limits)):
            stage_into(table, source)
        self.overflow.zero_()
        self._rows = [[list(row) for row in rows] for rows in pages]
        self._allocated = [{page for row in rows for page in row} for rows in pages]
        self.num_live = num_reqs
        self.limits_host = tuple(token_limits)
        self.longest = max(token_limits, default=0)
        self.writable_host = starts

    def condense(self, kept_rows: Sequence[int], num_new: int = 0) -> None:
        """Move row kept_rows[i] to row i without waiting for the device. The num_new rows after them are live and hold
        nothing until they `grow`; the rest is padding. The host cost grows with the pages of removed rows only.

        Raises BatchError, and changes nothing, for a row that is not live or is named twice, and for too many rows.
        """
        require_counts("kept_rows and num_new", (*kept_rows, num_new))
        kept = len(kept_rows)
        if len(set(kept_rows)) != kept or (kept and not 0 <= min(kept_rows) <= max(kept_rows) < self.num_live):
            raise BatchError(
                f"kept_rows must be distinct live rows, 0 to {self.num_live - 1}, got {list(kept_rows)}; two requests "
                "would share pages, or one have none. List each row once, and grow new ones."
            )
        require(
            0 <= num_new <= self.max_reqs - kept,
            f"at most {self.max_reqs} requests fit these tables, got {kept} kept and {num_new} new ones. Allocate "
            "larger tables or run the rest in another batch.",
        )
        order = staged(kept_rows, self.device)
        self.block_tables[:, :kept] = self.block_tables.index_select(1, order)
        self.block_tables[:, kept:].fill_(UNALLOCATED)
        self.token_limits[:kept] = self.token_limits.index_select(0, order)
        self.token_limits[kept:].zero_()
        self.overflow.zero_()
        self._allocated = [self._allocated_to(group, kept_rows) for group in range(self.num_groups)]
        self._rows = [[*map(rows.__getitem__, kept_rows), *([] for _ in range(num_new))] for rows in self._rows]
        self.num_live = kept + num_new
        self.limits_host = (*map(self.limits_host.__getitem__, kept_rows), *(0,) * num_new)
        self.longest = max(self.limits_host, default=0)
        self.writable_host = (*map(self.writable_host.__getitem__, kept_rows), *(0,) * num_new)

    def _allocated_to(self, group: int, kept_rows: Sequence[int]) -> set[int]:
        """Return the pages of a group that the kept rows hold, by removing those of the other rows."""
        if not kept_rows:
            return set()
        rows, allocated, size = self._rows[group], self._allocated[group], self.page_sizes_host[group]
        for row in set(range(self.num_live)).difference(kept_rows):
            allocated.difference_update(rows[row])
        # A prefix shared with a removed row is still read.
        for row in kept_rows:
            if start := self.writable_host[row]:
                allocated.update(rows[row][: start // size])
        return allocated

    def grow(self, pages: Mapping[int, Sequence[Sequence[int]]], token_limits: Mapping[int, int]) -> None:
        """Append pages to live requests in place and raise their limits, without waiting for the device.

        pages[request][group] lists the new page ids; token_limits[request] is the new limit. Raises BatchError, and
        changes nothing, if the two name different requests, for a request that is not an int or not live, a limit below
        the current one or beyond the pages, and an id that is out of range or already owned.
        """
        require_counts("requests", (*pages, *token_limits))
        if pages.keys() != token_limits.keys() or not all(0 <= request < self.num_live for request in pages):
            raise BatchError(
                f"pages and limits must be for the same requests, 0 to {self.num_live - 1}, got {sorted(pages)} and "
                f"{sorted(token_limits)}. Load a request before it grows."
            )
        require_counts("token limits", token_limits.values())
        for request, groups in pages.items():
            self._check_growth(request, groups, token_limits[request])
        self._check_appended(pages)
        self._write_growth(pages, token_limits)
        for request, groups in pages.items():
            for row, allocated, new in zip(self._rows, self._allocated, groups, strict=True):
                row[request] += new
                allocated.update(new)
        limits = list(self.limits_host)
        for request, limit in token_limits.items():
            limits[request] = limit
        self.limits_host = tuple(limits)
        self.longest = max(limits, default=0)

    def _write_growth(self, pages: Mapping[int, Sequence[Sequence[int]]], token_limits: Mapping[int, int]) -> None:
        for group, rows in enumerate(self._rows):
            entries: tuple[list[int], ...] = ([], [], [])  # row, column and page of each new entry
            for request, groups in pages.items():
                start, new = len(rows[request]), groups[group]
                entries[0].extend([request] * len(new))
                entries[1].extend(range(start, start + len(new)))
                entries[2].extend(new)
            if entries[0]:
                row, column, page = staged(entries, self.device)
                self.block_tables[group, row, column] = page.int()
        if token_limits:
            row, limit = staged([list(token_limits), list(token_limits.values())], self.device)
            self.token_limits[row] = limit.int()

    def _check_growth(self, request: int, groups: Sequence[Sequence[int]], limit: int) -> None:
        counts, max_tokens = [], self.max_seq_len
        for rows, new, size in zip(self._rows, groups, self.page_sizes_host, strict=False):
            counts.append(len(rows[request]) + len(new))
            max_tokens = min(max_tokens, counts[-1] * size)
        if len(groups) != self.num_groups or max(counts) > self.max_pages:
            raise BatchError(
                f"request {request} has {[len(rows[request]) for rows in self._rows]} pages in {self.num_groups} "
                f"groups and can have {self.max_pages} in each, got {[len(new) for new in groups]} more. Pass one list "
                "per group, or enlarge the tables."
            )
        if not self.limits_host[request] <= limit <= max_tokens:
            raise BatchError(
                f"request {request} can hold {self.limits_host[request]} tokens, and {max_tokens} once grown, got a "
                f"limit of {limit}; it would write outside its pages. Append more pages, or lower the limit."
            )

    def _check_appended(self, pages: Mapping[int, Sequence[Sequence[int]]]) -> None:
        for group in range(self.num_groups):
            appended = [page for groups in pages.values() for page in groups[group]]
            require_counts(f"page ids of group {group}", appended)
            distinct = set(appended)
            in_pool = not distinct or 0 <= min(distinct) <= max(distinct) < self.num_pages[group]
            if not in_pool or len(distinct) != len(appended) or not distinct.isdisjoint(self._allocated[group]):
                raise BatchError(
                    f"pages appended to group {group} must be 0 to {self.num_pages[group] - 1} and free, got "
                    f"{appended}; two requests would share a slot. Take them from the free list."
                )

    def _check_shape(
        self, pages: Sequence[Sequence[Sequence[int]]], token_limits: Sequence[int], writable_from: Sequence[int]
    ) -> None:
        num_reqs = len(token_limits)
        require(
            num_reqs <= self.max_reqs,
            f"at most {self.max_reqs} requests fit these tables, got {num_reqs}. "
            "Allocate larger tables or run the rest in another batch.",
        )
        require(
            len(pages) == self.num_groups
            and all(len(rows) == num_reqs for rows in pages)
            and len(writable_from) == num_reqs,
            f"pages must hold {self.num_groups} groups of {num_reqs} rows, got {[len(rows) for rows in pages]} rows "
            f"and {len(writable_from)} writable_from. Pass one row per request and group.",
        )
        require_counts("token limits and writable_from", (*token_limits, *writable_from))
        if not all(0 <= start <= limit for start, limit in zip(writable_from, token_limits, strict=True)):
            raise BatchError(
                f"writable_from must be positions, 0 to the request's token limit, got {list(writable_from)} for "
                f"limits {list(token_limits)}; prefix pages would be mistaken for others. Pass 0 if all pages are "
                "writable."
            )

    def _check_group(
        self, group: int, rows: Sequence[Sequence[int]], token_limits: Sequence[int], writable_from: Sequence[int]
    ) -> None:
        size = self.page_sizes_host[group]
        owner: dict[int, int] = {}
        for request, (row, limit) in enumerate(zip(rows, token_limits, strict=True)):
            needed = -(-limit // size)
            require_counts(f"page ids of group {group}", row)
            if not 1 <= limit <= self.max_seq_len or len(row) > self.max_pages:
                raise BatchError(
                    f"request {request} must hold 1 to {self.max_seq_len} tokens in at most {self.max_pages} pages, "
                    f"got {limit} tokens in {len(row)} pages. Lower the limit or raise max_seq_len."
                )
            if len(row) < needed:
                raise BatchError(
                    f"request {request} can grow to {limit} tokens, which takes {needed} pages of {size} in group "
                    f"{group}, but has {len(row)}; it would write outside its pages. Allocate more or lower its token "
                    "limit."
                )
            if len(set(row)) != len(row):
                raise BatchError(
                    f"request {request} must list each page of group {group} once, got {list(row)}; two of its "
                    "positions would share a slot. Give each position its own page."
                )
            for page in row:
                if not 0 <= page < self.num_pages[group]:
                    raise BatchError(
                        f"page ids of group {group} must be 0 to {self.num_pages[group] - 1}, request {request} lists "
                        f"{page}; a kernel would read outside the cache. List pages of this pool only."
                    )
            for page in row[writable_from[request] // size :]:
                if (other := owner.setdefault(page, request)) != request:
                    raise BatchError(
                        f"page {page} of group {group} is writable by requests {other} and {request}; each would "
                        "overwrite the other's keys. Share only pages before writable_from."
                    )
        for request, row in enumerate(rows):
            for page in row[: writable_from[request] // size]:
                if (other := owner.get(page, request)) != request:
                    raise BatchError(
                        f"page {page} of group {group} is read by request {request} and writable by request {other}; "
                        "its prefix would be overwritten. Copy the page first."
                    )
