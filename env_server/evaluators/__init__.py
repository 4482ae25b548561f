"""OSWorld's graders: getters read a desktop's state, metrics compare it, `grading` joins them as OSWorld does."""
