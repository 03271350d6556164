"""Whose turn it is among requests that wait: start-time fair queueing between tenants, first come first served within.

After Goyal, Vin and Cheng, "Start-time Fair Queueing" (1996). A tenant's clock runs on by what its requests cost, over
its weight; the tenant whose clock stands lowest is next. What two tenants got while both had requests waiting never
differs, over their weights, by more than one request of each. A tenant that comes back from a pause starts at the
clock of whoever was served last: it has saved nothing up, and it waits behind nobody's flood.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass
class _Tenant(Generic[T]):
    """`start`: where its clock stands, and with that the turn of its first item. `since`: its place among equals.

    `waiting`: for each item by how much it will move the clock.
    """

    start: float
    since: int
    waiting: OrderedDict[T, float] = field(default_factory=OrderedDict)


class FairQueue(Generic[T]):
    """Items that wait, each on behalf of a tenant. Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._tenant_of: dict[T, str] = {}
        self._now = 0.0
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def add(self, item: T, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Put an item behind its tenant's others. `cost` > 0 in any unit that all share; `weight` > 0."""
        assert item not in self._tenant_of
        assert cost > 0
        assert weight > 0
        found = self._tenants.setdefault(tenant, _Tenant(self._now, self._num_turns))
        found.waiting[item] = cost / weight
        self._tenant_of[item] = tenant

    def pop(self) -> T:
        """Take the item whose turn it is. Raises `IndexError` when there is none."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not waiting:
            raise IndexError("nothing waits")
        tenant = min(waiting, key=lambda tenant: (tenant.start, tenant.since))
        item, advance = tenant.waiting.popitem(last=False)
        del self._tenant_of[item]
        self._now = tenant.start
        self._num_turns += 1
        tenant.start += advance
        tenant.since = self._num_turns
        self._forget_idle()
        return item

    def remove(self, item: T) -> bool:
        """Take an item out of turn, at no cost to its tenant; false when it does not wait (any more)."""
        tenant = self._tenant_of.pop(item, None)
        if tenant is None:
            return False
        del self._tenants[tenant].waiting[item]
        return True

    def _forget_idle(self) -> None:
        """Tenants whose clock is behind: they come back as if they were new, at the clock of now."""
        idle = [name for name, tenant in self._tenants.items() if not tenant.waiting and tenant.start <= self._now]
        for name in idle:
            del self._tenants[name]
