// Descriptors beside the bytes of a Unix socket.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstring>

#include "shared_memory.hpp"

namespace farcall {

// The descriptor that came with a message, if any. Those that a peer sent more of are closed.
inline Descriptor descriptor_of(msghdr& message) {
  Descriptor descriptor;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof received, sizeof received);
      descriptor.reset(received);
    }
  }
  return descriptor;
}

using Control = char[CMSG_SPACE(sizeof(int))];

// Sends a descriptor with a message. `control` is the memory for that.
inline void attach(msghdr& message, Control& control, int descriptor) {
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
}

}  // namespace farcall
