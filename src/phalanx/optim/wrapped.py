"""An optimizer around another one: what schedulers, scalers and checkpoints ask for is forwarded by name to the one inside."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from phalanx.comm.communicator import Communicator
from phalanx.comm.elastic.membership import Membership

if TYPE_CHECKING:
    from phalanx.grad.following import Following


class WrappedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose groups, state and hooks are those of `optimizer`."""

    replicas_differ: ClassVar[bool] = False  # between steps: an evaluation then needs their mean

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Communicator) -> None:
        # not super().__init__(): it would make a second set of groups and state beside the inner optimizer's
        self.optimizer, self.comm = optimizer, comm
        self.membership_hooks: list[Callable[[Any, Membership], None]] = []  # to be called when the membership changes
        self._following: Following | None = None
        if comm.elastic:
            from phalanx.grad.following import follow  # few scripts are elastic

            self._following = follow(comm)
        self._statistics: list[torch.Tensor] = []

    def follow(self, model: torch.nn.Module) -> None:
        """Let the running statistics of `model` (floating-point buffers that a state dict has) take part in `average_`.

        With gossip they follow every exchange, too.
        """
        saved = {id(x) for x in model.state_dict(keep_vars=True).values()}
        self._statistics = [x for x in model.buffers() if id(x) in saved and x.is_floating_point()]

    def parameters(self) -> tuple[list[torch.nn.Parameter], list[str]]:
        """All parameters of all groups, tied ones once, and what to call them in messages."""
        return parameters_of(self.optimizer)

    # ---- ranks that die and join ---------------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Who takes part: `epoch`, the members in rank order as `ranks`, and the `history` of changes."""
        return self.comm.membership

    def on_membership_change(self, hook: Callable[[Any, Membership], None]) -> None:
        """Call `hook(opt, opt.membership)` after ranks have died or joined: for a learning-rate policy of your own, for example.

        All ranks register the same hooks. They are called in `step()`, before the first update after the change, on all ranks,
        including those that joined with it. Ranks that join later get what a hook changes in `param_groups`.

        Args:
            hook: A function of the optimizer and its membership. It runs in the training thread, and may use the communicator.
        """
        self.membership_hooks.append(hook)

    def share(self, **objects: Any) -> None:
        """Name what a rank that joins later gets from the others, beside parameters and optimizer state. All ranks call it.

        With `create_communicator(elastic=True)` only. On a rank that joins a running job it returns when this rank has the state
        of the others, and takes part from the next step.

        Args:
            objects: Anything with `state_dict()` and `load_state_dict()`, such as `model=model, loader=loader`. With a
                `phalanx.data.Loader` the world changes when your loop asks for the next batch, otherwise at the end of `step()`.
        """
        if not self.comm.elastic:
            raise ValueError("share() is for ranks that join: create the communicator with elastic=True")
        from phalanx.optim.shared_state import share

        share(self, objects)

    @property
    def following(self) -> Following:
        """How this optimizer follows the membership of an elastic job. For Phalanx itself."""
        assert self._following is not None
        return self._following

    def own_state(self) -> dict[str, Any]:
        """What a rank that joins gets beside the state of the inner optimizer, as plain data and tensors. For Phalanx itself."""
        raise NotImplementedError

    def load_own_state(self, state: dict[str, Any]) -> None:
        """On a rank that joins, which has the parameters and the state of the inner optimizer already. For Phalanx itself."""
        raise NotImplementedError

    # ---- as the one inside ---------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(self._seeing_me(hook))

    def register_step_post_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_post_hook(self._seeing_me(hook))

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_state_dict_pre_hook(self._seeing_me(hook), prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_state_dict_post_hook(self._seeing_me(hook), prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(self._seeing_me(hook), prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optimizer.register_load_state_dict_post_hook(self._seeing_me(hook), prepend)

    def _seeing_me(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, which gets the optimizer that it was registered on instead of the one inside."""
        me = weakref.ref(self)  # the one inside would keep us alive otherwise

        def called(inner: torch.optim.Optimizer, *arguments: Any) -> Any:
            outer = me()
            return hook(outer if outer is not None else inner, *arguments)

        return called

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it holds connections and hooks. Save opt.state_dict(), or pickle "
            "opt.optimizer, the optimizer inside, and wrap it again with phalanx.create_multi_node_optimizer"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> tuple[list[torch.nn.Parameter], list[str]]:
    """All parameters of all groups, tied ones once, and what to call them in messages."""
    params = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
    return params, names_of(optimizer, params)


def names_of(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> list[str]:
    """What to call the parameters in messages: their own names where the optimizer was given them, else group and shape."""
    named: dict[torch.nn.Parameter, str] = {}
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, p in enumerate(group["params"]):
            named.setdefault(p, given[i] if given else f"param_groups[{g}]['params'][{i}] {tuple(p.shape)}")
    return [named[p] for p in params]
