"""The compiled part of `kernels.ngrams`: its table, and the kernel that learns tokens and proposes drafts."""
