/* A C library for which files below NO_LOCKS_ROOT have no locks, as on Lustre without the mount option flock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int has_no_locks(int descriptor) {
    char link[64], path[PATH_MAX + 1];
    const char *root = getenv("NO_LOCKS_ROOT");
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = root ? readlink(link, path, PATH_MAX) : -1;
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, root, strlen(root)) == 0;
}

int flock(int descriptor, int operation) {
    static int (*real)(int, int);
    if (!real) real = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    if (has_no_locks(descriptor)) {
        errno = ENOLCK;
        return -1;
    }
    return real(descriptor, operation);
}

static int checked(const char *name, int descriptor, int command, void *argument) {
    int (*real)(int, int, ...) = (int (*)(int, int, ...))dlsym(RTLD_NEXT, name);
    int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
    if (locks && has_no_locks(descriptor)) {
        errno = ENOLCK;
        return -1;
    }
    return real(descriptor, command, argument);
}

int fcntl(int descriptor, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    return checked("fcntl", descriptor, command, argument);
}

int fcntl64(int descriptor, int command, ...) {
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    return checked("fcntl64", descriptor, command, argument);
}
