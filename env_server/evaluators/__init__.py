"""OSWorld's graders: getters read a desktop's state, metrics compare it, `grading` combines them as OSWorld does."""
