/* A switch between network namespaces: a port of `rate` bit/s each way per namespace, and a one-way delay between any two.
 *
 *     lab_switch RATE DELAY_NS OWNER_PID NETNS...       prints "ready", then forwards until the process OWNER_PID ends
 *
 * Each namespace gets a TAP device eth0 with address 02:77:00:00:00:i. Its frames are the kernel's, up to 64 KiB, unsegmented and
 * without checksums (IFF_VNET_HDR): one read and one write carry 45 packets. A frame occupies the sender's port and then, or already
 * meanwhile (cut-through), the receiver's, each for bytes / rate; it arrives `delay` later. Before a receiver's port frames queue, as
 * in a switch with buffers. Nothing is dropped: a port whose last frame would wait longer than RECEIVE_QUEUE is not read until it
 * would not, and the sender's kernel keeps what it has. A short queue here makes all that a host sends wait for its busiest receiver.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PORTS = 128, HEADER = 10, FRAME = HEADER + 14 + 65536, ROUNDS = 16 };
static const int64_t SEND_QUEUE = 1000000, RECEIVE_QUEUE = 10000000; /* ns */

struct frame {
    struct frame *next;
    int64_t due;
    ssize_t size;
    unsigned char bytes[FRAME];
};

struct port {
    int fd;
    int64_t sends_until, receives_until; /* when its two directions are free */
    int64_t read_at;                     /* not before */
    struct frame *first, *last;          /* on their way to it, in order of arrival */
};

static struct port port[PORTS];
static int ports;
static double ns_per_byte;
static int64_t delay;
static struct frame *spare;

static void die(const char *what) {
    fprintf(stderr, "lab_switch: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

static int open_tap(const char *netns, int number) {
    int space = open(netns, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET)) die(netns);
    close(space);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun");
    struct ifreq request = {.ifr_name = "eth0", .ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    if (ioctl(fd, TUNSETIFF, &request)) die("TUNSETIFF eth0");
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("TUNSETOFFLOAD");
    unsigned char address[6] = {2, 0x77, 0, 0, 0, number};
    request.ifr_hwaddr.sa_family = ARPHRD_ETHER;
    memcpy(request.ifr_hwaddr.sa_data, address, 6);
    if (ioctl(fd, SIOCSIFHWADDR, &request)) die("SIOCSIFHWADDR eth0");
    return fd;
}

static struct frame *new_frame(void) {
    struct frame *f = spare;
    if (f) spare = f->next;
    else if (!(f = malloc(sizeof *f))) die("memory");
    return f;
}

static void free_frame(struct frame *f) {
    f->next = spare;
    spare = f;
}

/* Bytes on the wire: the kernel's frame still stands for several packets, each of which would carry the headers again. */
static int64_t wire_bytes(const struct frame *f) {
    struct virtio_net_hdr hint;
    memcpy(&hint, f->bytes, HEADER);
    int64_t size = f->size - HEADER;
    if (hint.gso_type == VIRTIO_NET_HDR_GSO_NONE || hint.gso_size == 0) return size;
    int tcp = HEADER + hint.csum_start; /* its header begins where the checksum begins */
    int64_t headers = hint.csum_start + (tcp + 12 < f->size ? 4 * (f->bytes[tcp + 12] >> 4) : 20);
    int64_t packets = (size - headers + hint.gso_size - 1) / hint.gso_size;
    return size + (packets - 1) * headers;
}

/* Puts `f` on the wire from `source` to `target`; the source is next read when its queue is short again. */
static void forward(struct frame *f, struct port *source, struct port *target, int64_t t) {
    int64_t takes = (int64_t)(wire_bytes(f) * ns_per_byte);
    int64_t begins = later(source->sends_until, t);
    source->sends_until = begins + takes;
    target->receives_until = later(begins, target->receives_until) + takes;
    source->read_at = later(source->sends_until - SEND_QUEUE, target->receives_until - RECEIVE_QUEUE);
    f->due = target->receives_until + delay;
    f->next = NULL;
    if (target->first) target->last->next = f;
    else target->first = f;
    target->last = f;
}

/* One frame of port `i`, to the port that its destination address names or, if it names none, to all others. */
static int take(int i, int64_t t) {
    struct frame *f = new_frame();
    f->size = read(port[i].fd, f->bytes, FRAME);
    if (f->size < HEADER + 14) {
        free_frame(f);
        return 0;
    }
    unsigned char *to = f->bytes + HEADER;
    if (to[0] == 2 && to[1] == 0x77 && to[5] < ports) {
        forward(f, &port[i], &port[to[5]], t);
        return 1;
    }
    for (int j = 0; j < ports; j++) {
        if (j == i) continue;
        struct frame *copy = new_frame();
        copy->size = f->size;
        memcpy(copy->bytes, f->bytes, f->size);
        forward(copy, &port[i], &port[j], t);
    }
    free_frame(f);
    return 1;
}

static void deliver(struct port *p, int64_t t) {
    while (p->first && p->first->due <= t) {
        struct frame *f = p->first;
        p->first = f->next;
        /* an interface that is down refuses: the frame is lost, as on a pulled cable */
        if (write(p->fd, f->bytes, f->size) < 0 && errno != EIO && errno != EINVAL) die("write");
        free_frame(f);
    }
}

int main(int count, char **argument) {
    if (count < 5 || count - 4 > PORTS) {
        fprintf(stderr, "usage: lab_switch RATE DELAY_NS OWNER_PID NETNS... (at most %d)\n", PORTS);
        return 2;
    }
    ns_per_byte = 8e9 / atof(argument[1]);
    delay = atoll(argument[2]);
    int owner = syscall(SYS_pidfd_open, atoi(argument[3]), 0);
    if (owner < 0) die("the owner");
    int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    for (ports = 0; ports < count - 4; ports++) port[ports].fd = open_tap(argument[4 + ports], ports);
    if (setns(home, CLONE_NEWNET)) die("the way home"); /* the last host has no more processes than the others */

    /* a network does not wait for the CPUs of its hosts; where that is not allowed it works less exactly */
    struct sched_param first = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &first);
    prctl(PR_SET_TIMERSLACK, 1);
    puts("ready");
    fflush(stdout);

    for (;;) {
        int64_t t = now(), wake = INT64_MAX;
        struct pollfd watch[PORTS + 1] = {{.fd = owner, .events = POLLIN}};
        for (int i = 0; i < ports; i++) {
            deliver(&port[i], t);
            if (port[i].first && port[i].first->due < wake) wake = port[i].first->due;
            int open = port[i].read_at <= t;
            if (!open && port[i].read_at < wake) wake = port[i].read_at;
            watch[i + 1] = (struct pollfd){.fd = open ? port[i].fd : -1, .events = POLLIN};
        }
        int64_t rest = later(wake - now(), 0);
        struct timespec timeout = {rest / 1000000000, rest % 1000000000};
        if (ppoll(watch, ports + 1, wake == INT64_MAX ? NULL : &timeout, NULL) < 0 && errno != EINTR) die("poll");
        if (watch[0].revents) return 0;
        t = now();
        for (int round = 0, busy = 1; busy && round < ROUNDS; round++) {
            busy = 0;
            for (int i = 0; i < ports; i++) /* one frame each in turn: ports share a receiver evenly */
                if ((watch[i + 1].revents & POLLIN) && port[i].read_at <= t) busy |= take(i, t);
        }
    }
}
